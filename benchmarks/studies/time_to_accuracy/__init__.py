"""Score over seconds: real trainings, and iterations on emulated hosts; `scripts/study time_to_accuracy`."""
