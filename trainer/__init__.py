"""The program behind train.py: its flags, its data, its job, and the results it makes."""
