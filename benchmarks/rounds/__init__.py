"""What a round of Horovod's costs, and where its time goes."""
