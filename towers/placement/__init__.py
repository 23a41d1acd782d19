"""Where things are: devices, variables, precision and compilation on them."""
