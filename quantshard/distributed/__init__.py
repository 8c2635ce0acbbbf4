"""Parameters and activations over ranks: tensor parallelism, expert parallelism, replicas."""
