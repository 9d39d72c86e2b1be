"""The site of the documentation, which ``make docs`` builds with Sphinx.

Its root is the repository: Markdown pages are read where they lie, so their links work in the site
and on a code host. ``contents.md`` gives the order of the pages. ``reference.md`` names the modules
of the reference, which Sphinx makes from the docstrings.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.nodes import Element, TextElement
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.typing import stringify_annotation
from typing_extensions import get_original_bases, get_type_hints, is_typeddict

import torch_dynemb

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from public_names import MODULES, listed_names, returned_records  # noqa: E402

# Signs of formulas, such as |w| and w *= 2, that would be markup outside of literals.
FORMULA = re.compile(r"\||(?<!\S)\*(?=[^\s*])(?!\w+:)")

project = "torch_dynemb"
version = release = torch_dynemb.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "README"
include_patterns = ["**.md", "build/reference/*.rst"]
exclude_patterns = [".*", "build/[!r]*", "dist", "runs", "docs/contents.md"]
myst_heading_anchors = 6
nitpicky = True

templates_path = [str(DOCS / "templates")]
autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_param = False  # an entry may describe several arguments
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style"), ("Fields", "params_style")]
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"torch_dynemb {release}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


PAGES, HERE, ELSEWHERE = listed_names()
NAMES = {
    name
    for module, value in list(sys.modules.items())
    if module.startswith("torch_dynemb.")
    for name in vars(value)
}
SHORT = {page.rpartition(".")[2]: page for page in PAGES.values()}
autosummary_context = {"here": HERE, "elsewhere": ELSEWHERE}


def remove_old_pages(app: Sphinx, config: Config) -> None:
    """Remove pages of names that are not public any more: what an earlier build has written."""
    pages = {
        f"{module}.{n}" for module in MODULES for names in HERE[module].values() for n in names
    }
    for file in (DOCS.parent / "build" / "reference").glob("*.rst"):
        if file.stem not in pages.union(MODULES):
            file.unlink()


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the list of pages to the first page, which a code host shows without it."""
    if docname == root_doc:
        source[0] += "\n" + (DOCS / "contents.md").read_text()


def leave_folders(app: Sphinx, doctree: nodes.document) -> None:
    """Leave links to folders, which the site does not have, as text."""
    folder = (DOCS.parent / app.env.docname).parent
    for node in list(doctree.findall(pending_xref)):
        if node["reftype"] == "myst" and (folder / node["reftarget"]).is_dir():
            node.replace_self(node.children)


def skip_member(
    app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any
) -> bool | None:
    """Skip what classes inherit from others, and fields of named tuples: `Attributes` has them."""
    if type(member).__name__ == "_tuplegetter" or hasattr(member, "__objclass__"):
        return True
    if inspect.isbuiltin(member):
        return True
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    module = getattr(function, "__module__", None) or "torch_dynemb"
    return None if module.startswith("torch_dynemb") else True


def shorten_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returns: str
) -> tuple[str | None, str]:
    """Make a signature that Sphinx can read of one with a default that is made at each call."""
    return signature and signature.replace("<factory>", "..."), returns


def options_docstring(options: type) -> str:
    """Write the docstring of a TypedDict with the types of its options, and those of its bases."""
    own, _, entries = inspect.cleandoc(options.__doc__ or "").partition("\n\nAttributes:\n")
    for name, hint in get_type_hints(options).items():
        shown = re.sub(r"(torch_dynemb(\.\w+)*|collections\.abc)\.", "", stringify_annotation(hint))
        entries = re.sub(rf"^(    {name})(?=: )", rf"\1 (``{shown}``)", entries, flags=re.MULTILINE)
    text = f"{own}\n\nAttributes:\n{entries}" if entries else own
    for base in get_original_bases(options):
        if is_typeddict(base):
            text += f"\n\nOptions of :class:`{base.__qualname__}`:\n\n{options_docstring(base)}"
    return text


def prepare_docstring(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Prepare a docstring for Sphinx, which reads some of ours as it should not."""
    if what == "data" and value.__doc__ == type(value).__doc__:
        lines.clear()  # what Python says of each tuple
    if is_typeddict(value):
        lines[:] = options_docstring(value).splitlines()
    for record in returned_records(value):
        if id(record) not in PAGES:
            about = inspect.cleandoc(record.__doc__ or "").replace("Attributes:", "Fields:")
            lines += ["", *f"``{record.__name__}``: {about}".splitlines(), ""]
    in_example = False
    for number, line in enumerate(lines):
        in_example = line.lstrip().startswith(">>>") or (in_example and line.strip() != "")
        if not in_example:
            parts = line.split("``")
            parts[::2] = [FORMULA.sub(r"\\\g<0>", part) for part in parts[::2]]
            lines[number] = "``".join(parts)
    if what in ("attribute", "property"):
        # Sphinx would take a colon as the end of a type: read it as a method. The comment on top
        # keeps Sphinx from reading the result a second time.
        text = GoogleDocstring(lines, app.config, app, "method", name, value, options)
        lines[:] = ["..", "", *text.lines()]


def public_name(target: str) -> str | None:
    """Find the page of a name.

    Args:
        target: a dotted name.

    Returns:
        The name that the reference has it by; None if it has no page.

    Raises:
        AttributeError, ImportError, ValueError: unknown name.
    """
    value = pkgutil.resolve_name(target)
    if id(value) in PAGES:
        return PAGES[id(value)]
    owner, _, member = target.rpartition(".")
    page = public_name(owner) if owner else None
    return page and f"{page}.{member}"


def find_reference(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: TextElement
) -> Element | None:
    """Find names that are not public where a reference looks for them.

    A name without a page stays text; without a name the build fails.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if node["reftype"] == "attr" and "." not in target:
        return text  # of an instance: a class need not know it
    first, dot, more = target.partition(".")
    scope = ".".join(filter(None, (node.get("py:module"), node.get("py:class"))))
    for name in (
        target,
        f"builtins.{target}",
        f"{scope}.{target}",
        SHORT.get(first, "") + dot + more,
    ):
        try:
            page = public_name(name)
            break
        except (AttributeError, ImportError, ValueError):
            continue
    else:
        if first not in NAMES:
            return None
        page = None
    if page is None or page == target or app.builder is None:
        return text
    domain = env.domains["py"]
    return (
        domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], page, node, text)
        or text
    )


def show_near_pages(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Unfold only the part of the navigation that a page is in; all of it takes minutes."""
    if toctree := context.get("toctree"):
        context["toctree"] = lambda **options: toctree(**{**options, "collapse": True})


def write_index(app: Sphinx, error: Exception | None) -> None:
    """Give the first page the name that browsers and servers look for."""
    if error is None:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("config-inited", remove_old_pages)
    app.connect("source-read", add_contents)
    app.connect("doctree-read", leave_folders)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)
    app.connect("missing-reference", find_reference)
    app.connect("html-page-context", show_near_pages, priority=400)
    app.connect("build-finished", write_index)
