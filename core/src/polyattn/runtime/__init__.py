"""What runs? Groups, caches, batches, plans, and the classes of backends."""
