"""Many small batches, composed at random of requests whose right answers are known, NaN beside them."""
