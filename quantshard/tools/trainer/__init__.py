"""What `quantshard train` is: configuration, data, model, loop and processes."""
