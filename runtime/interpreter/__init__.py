"""What a file means, on one device: an interpreter of checked models, which shares nothing with the compiler."""
