"""Gradients that the model function takes itself, in the place of an optimizer."""


class GradientsOfModel:
    """What `build_towers` takes for an optimizer where model functions have optimizers of their
    own.

    Each tower's call of the model function is made within `call`; what it then hands over as its
    gradients is what the model function has taken there. Their weights are its business, too.
    """

    def call(self, index, shards, placement):
        """The context manager in which tower number `index` of these `Shards` calls the model
        function; `placement` is the `Placement` of the variables."""
        raise NotImplementedError

    def optimizers(self):
        """List of the optimizers that the model function uses, each once."""
        raise NotImplementedError

    def slots(self):
        """The variables that optimizers have made within the calls."""
        raise NotImplementedError

    def fetches(self):
        """Tensors and operations that the call which ended last has made for a step."""
        raise NotImplementedError

    def compute_gradients(self, loss, var_list=None):
        """The `(gradient, variable)` pairs of that call; of no other loss or variables."""
        raise NotImplementedError

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """The operation that updates the variables, of the combined pairs."""
        raise NotImplementedError
