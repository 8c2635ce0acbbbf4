"""Parameters and activations over ranks: tensor parallelism, experts, replicas."""
