"""AMD GPUs: Composable Kernel attention through AITER and flash-attn."""
