"""Steps of Adam, Lion and Muon over many tensors in a few launches."""
