"""`horovod-sparse plan`: buckets, what stays dense and why, and predicted iterations."""
