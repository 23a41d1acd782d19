"""The variables that a model function makes.

In comes each creation of a variable while the model function is called. Out goes a resource
variable on its device, which does what a program of TensorFlow 1 expects of a reference variable.
Read `new_variables`, with `variable_scopes`, then `tf1_variables` and `initial_values`; `slots` has
the variables that a build makes besides.
"""
