"""TPUs: ragged paged attention in Pallas."""
