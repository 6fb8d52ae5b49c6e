"""How Sphinx makes the site: MyST pages, notebooks as they were executed, and reference pages made from the code by `docs/_ext`.

Nothing here or in `_ext` asks the network. Warnings are errors (`make docs`), so a link that leads nowhere fails the build.
"""

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

project = "nntask"
author = "the nntask authors"
copyright = "the nntask authors, MIT licence"
version = release = version_of("nntask")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "command_line",
    "python_api",
    "code_tables",
]
exclude_patterns = ["_ext", "Thumbs.db", ".DS_Store", "**/.ipynb_checkpoints"]
default_role = "code"
smartquotes = False
nitpicky = True
# Types in signatures are those of other packages, or classes that no front door exports; every other kind of reference must lead somewhere.
nitpick_ignore_regex = [("py:(class|obj|data|attr|exc|func|meth|mod)", r".*")]
# "Raises" names errors by their last word, which two packages may share.
suppress_warnings = ["ref.python"]

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = "nntask"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb4f0", "color-brand-content": "#7fb4f0"},
}
pygments_style = "friendly"
pygments_dark_style = "native"
