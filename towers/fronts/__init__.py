"""Fronts: the interfaces that legacy code keeps: Estimator, Keras, optimizers."""
