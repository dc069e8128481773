"""timm."""
