"""SparDL: its step, who has which place in it, its phases, and how many teams there are."""

from horovod_sparse.sparsifiers.spardl.spardl import SparDL as SparDL
