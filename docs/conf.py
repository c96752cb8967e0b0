# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration. The build reads only this tree and needs no network and no GPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this tree, whatever is installed

from fused_ops import __version__

logger = logging.getLogger(__name__)

project = "fused-ops"
author = "fused-ops developers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = False

html_theme = "furo"
html_title = f"fused-ops {release}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["formulas.css"]
html_copy_source = False
html_show_sourcelink = False


# Formulas become MathML, which browsers draw themselves: no script from elsewhere, no LaTeX.


def _mathml(node: nodes.math | nodes.math_block, as_block: bool) -> str:
    # Two things that the converter reads otherwise than LaTeX: fractions of two bare digits, and
    # the index of an accented letter, which it would set below the letter.
    formula = re.sub(r"(\\[td]?frac)\s*(\d)\s*(\d)", r"\1{\2}{\3}", node.astext())
    formula = re.sub(r"(\\(?:tilde|hat|bar|vec) ?(?:\w|\{\w\}))(?=[_^])", r"{\1{}}", formula)
    try:
        return latex2mathml.tex2mathml(formula, as_block=as_block)
    except MathError as error:
        logger.warning("formula: %s", error, location=node)
        return ""


def _visit_inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _visit_block_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Register the formula renderer."""
    app.add_html_math_renderer("mathml", (_visit_inline_math, None), (_visit_block_math, None))
