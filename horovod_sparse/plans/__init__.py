"""What a plan is, and plans that need no times: which parameters form which bucket, which stay dense."""
