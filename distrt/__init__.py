"""distrt: data-parallel training over MPI with tf.distribute's programming model."""
