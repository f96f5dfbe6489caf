"""The documentation site: Sphinx renders the Markdown pages of docs/ and of the root as they are.

The source folder is the root of the repository, so that the same links work on the site and where the repository is
browsed. `make docs` treats warnings as errors: a link to a missing page, heading or file fails the build, and so does
a page that is in no menu. The build needs no network.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from pygments.lexer import RegexLexer
from pygments.token import Comment, Keyword, Name, String, Text
from sphinx.addnodes import pending_xref

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "antiphon"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "tests/data/LICENCES.md", "tests/traces/README.md"]
exclude_patterns = [".*", "**/.*", "build", "dist"]
nitpicky = True

myst_heading_anchors = 4
# Pictures are fenced blocks, which the browser of the repository draws, too.
myst_fence_as_directive = ["mermaid"]
# The pages about the API: names of types are not looked up, as most are of other libraries.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
nitpick_ignore_regex = [("py:.*", ".*")]

html_theme = "furo"
html_title = "antiphon"
# Its index.html leads from the root of the site to docs/index.html.
html_extra_path = ["site"]
html_copy_source = False
html_show_copyright = False

# The site's menus, in order: a caption and the pages under it, seen from docs/. `*` takes the rest of a folder in
# alphabetical order.
MENUS = {
    "Use": [
        *(
            "../README",
            "use",
            "client",
            "browser",
            "coming-from",
            "home",
            "models",
            "turn-models",
            "gpu",
            "certify",
            "packages",
            "deploy",
            "operations",
        ),
        "settings",
        *("hardening", "black-box", "keeping"),
        "measured",
    ],
    "Protocols": ["wire/index", "wire/openai-realtime", "wire/openai-transcription", "wire/*"],
    "Inside": ["architecture", "glossary", "api", "engine-library", "add-a-model", "add-a-dialect", "design/*"],
    "Project": [
        *("../CHANGELOG", "stability", "history", "../CONTRIBUTING", "../SECURITY"),
        *("../tests/traces/README", "../tests/data/LICENCES"),
    ],
}


class WireLexer(RegexLexer):
    """The examples of docs/wire: what the client (`->`) and the server (`<-`) send, and time that passes."""

    name = "wire"
    aliases = ("wire",)
    tokens: ClassVar = {
        "root": [
            (r"^(->|<-)", Keyword),
            (r"^\(.*\)$", Comment),
            (r'"(\\.|[^"\\])*"(?=:)', Name.Tag),
            (r'"(\\.|[^"\\])*"', String),
            (r"<[^<>\n]+>", Name.Variable),
            (r".|\n", Text),
        ]
    }


def _add_menus(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the menus to the home page. They are not in the file, where they would be read as code."""
    if page == root_doc:
        for caption, pages in MENUS.items():
            source[0] += "\n".join(["\n```{toctree}", ":hidden:", ":glob:", f":caption: {caption}", *pages, "```\n"])


def _unlink_folders(app: Sphinx, page: nodes.document) -> None:
    """Replace links to folders of the repository, which have no page on the site, with their text."""
    folder = (ROOT / app.env.docname).parent
    for link in list(page.findall(pending_xref)):
        if (folder / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    app.add_lexer("wire", WireLexer)
    app.connect("source-read", _add_menus)
    app.connect("doctree-read", _unlink_folders)
