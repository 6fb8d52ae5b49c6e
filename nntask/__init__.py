"""Neural networks on tile tensors.

Names are imported at their first use: the command line needs this package's errors and settings long before the rest.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
