"""Intel Gaudi: Unified Attention, in torch operations of static shapes."""
