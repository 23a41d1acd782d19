"""The interface for gradients that a model function takes itself, in place of an optimizer."""


class GradientsOfModel:
    """Stands in place of an optimizer where the model function has optimizers of its own.

    `build_towers` calls the model function within `call`. `compute_gradients` then returns the
    gradients that the model function has taken, weighted: their sum over the towers, which are
    copies, is the combined gradient.
    """

    def weights(self, shards):
        """The weights of the losses of all towers: a list of floats or scalars; None for none.

        Args:
          shards: `Shards`.
        """
        raise NotImplementedError

    def call(self, weight, is_even, placement):
        """The context of the call of the model function.

        Args:
          weight: of the first tower, as `weights` gave it; a tensor where they differ.
          is_even: whether all shards have the same number of examples.
          placement: `Placement` of the variables.
        """
        raise NotImplementedError

    def note_copy(self, copied):
        """Notes a further tower; `copied` is a function from a tensor or operation to its copy."""
        raise NotImplementedError

    def optimizers(self):
        """List of the optimizers that the model function uses, each once."""
        raise NotImplementedError

    def slots(self):
        """The variables that optimizers have made within the call."""
        raise NotImplementedError

    def fetches(self):
        """The tensors and operations that the call has made and that a step runs."""
        raise NotImplementedError

    def compute_gradients(self, loss, var_list=None):
        """The `(gradient, variable)` pairs that the call took, whatever the arguments are."""
        raise NotImplementedError

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """The operation that updates the variables with the combined pairs."""
        raise NotImplementedError
