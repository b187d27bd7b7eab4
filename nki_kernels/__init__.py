"""Kernels for AWS Trainium, one file per operation, written against the NKI API.

Where NKI is not installed, importing this package puts the stand-in of `simulator` in its place.
"""

from inferlib.nki_kernels.simulator import inject

inject()
