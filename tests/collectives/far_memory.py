"""Memory that messages cannot reach, as a GPU's: for the tests of the algorithms.

``FarMemory`` behaves as CudaKernels does: bytes are sent from and received into
buffers apart, and mean nothing before they are staged or after they have landed. The
arithmetic is the host's.
"""

import numpy as np

from distrt.kernels.host import HostKernels


class FarMemory(HostKernels):
    def stage_out(self, view):
        return view.view(np.uint8).copy()

    def landing(self, view):
        return np.full(view.nbytes, 0xAB, np.uint8)

    def land(self, view, buffer):
        view.view(np.uint8)[...] = buffer
        buffer[...] = 0xCD
