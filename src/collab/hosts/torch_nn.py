"""torch.nn.MultiheadAttention."""
