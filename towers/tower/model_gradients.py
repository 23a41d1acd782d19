"""The interface for gradients that a model function takes itself, in place of an optimizer."""


class GradientsOfModel:
    """Stands in place of an optimizer where the model function has optimizers of its own.

    `build_towers` calls the model function of each tower within `call`. `compute_gradients` then
    returns the gradients that the model function has taken in that call, weighted: their sum over
    the towers is the combined gradient.
    """

    def call(self, index, shards, placement):
        """The context of the call of the model function for tower number `index` of these `Shards`.

        `placement` is the `Placement` of the variables.
        """
        raise NotImplementedError

    def optimizers(self):
        """List of the optimizers that the model function uses, each once."""
        raise NotImplementedError

    def slots(self):
        """The variables that optimizers have made within the calls."""
        raise NotImplementedError

    def fetches(self):
        """The tensors and operations that the last call has made and that a step runs."""
        raise NotImplementedError

    def compute_gradients(self, loss, var_list=None):
        """The `(gradient, variable)` pairs that the last call took, whatever the arguments are."""
        raise NotImplementedError

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """The operation that updates the variables with the combined pairs."""
        raise NotImplementedError
