"""Several machines: TensorFlow's ring, its parameter servers, Horovod."""
