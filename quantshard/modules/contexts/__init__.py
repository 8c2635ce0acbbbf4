"""What is in force when a module runs: autocast, recomputation, refused arguments."""
