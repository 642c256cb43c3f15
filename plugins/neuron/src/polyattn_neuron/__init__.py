"""AWS Trainium: attention by the NKI library."""
