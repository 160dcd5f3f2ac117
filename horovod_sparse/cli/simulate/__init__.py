"""`horovod-sparse simulate`: steps of up to 4096 ranks, and where dense begins to win."""
