"""Score over seconds, by real trainings and by iterations on emulated hosts: `scripts/time_to_accuracy`."""
