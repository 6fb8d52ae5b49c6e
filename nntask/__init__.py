"""Neural networks on tile tensors.

Names are imported when they are first asked for: the command line lives on this package's errors and settings long before it needs the rest.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
