"""The site has the tree of the repository, so that a link between files is the same there, here and on a code host.

README.md is the front page. Every other file that a page links to becomes part of the site: a Markdown file as a page,
a picture as it is, and anything else, such as a source or a result, as a page that shows its text.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^( *```+).*?^\1 *$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]*)"[^>]*>\s*<img ([^>]*?)src="([^"]*)"([^>]*)>\s*</picture>'
)
SHOWN_AS_THEY_ARE = (".md", ".png", ".svg", ".gif")
LANGUAGES = {".py": "python", ".cu": "cuda", ".cuh": "cuda", ".cpp": "cpp", ".json": "json", ".cff": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    tree = Files([file for file in files if file.src_dir != config.docs_dir])
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files if file.src_dir == config.docs_dir)]
    while waiting:
        path = waiting.pop()
        if tree.get_file_from_path(path) or tree.get_file_from_path(_page_of(path)):
            continue
        if path.startswith("docs/") or path.endswith(SHOWN_AS_THEY_ARE):
            tree.append(File(path, str(root), config.site_dir, config.use_directory_urls))
        else:
            tree.append(File.generated(config, _page_of(path), content=_as_page(root, path)))
        if path.endswith(".md"):
            linked = (_target(path, link) for _, link, _ in LINK.findall(FENCE.sub("", (root / path).read_text())))
            waiting += [target for target in linked if (root / target).is_file() and not target.startswith("..")]
    return tree


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.parent is None:  # a list of neighbours would be empty, and tables and code are wide
        page.meta["hide"] = ["navigation"]

    def with_page(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        shown = files.get_file_from_path(_page_of(_target(page.file.src_uri, link)))
        return f"{before}{_page_of(link)}{after}" if shown else match[0]

    return _between_fences(markdown, lambda text: _nested_lists(LINK.sub(with_page, text)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A <picture> follows the system's theme; the site has a switch, so it gets both pictures, one of them hidden."""
    return PICTURE.sub(r'<div class="wide"><img \2src="\3#only-light"\4><img \2src="\1#only-dark"\4></div>', html)


def _target(page: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _page_of(path: str) -> str:
    return f"{path}.md"


def _as_page(root: Path, path: str) -> str:
    text, suffix = (root / path).read_text(), Path(path).suffix
    listing = f"# {path}\n\n````{LANGUAGES.get(suffix, 'text')}\n{text}\n````\n"
    shown = _notebook(text) if suffix == ".ipynb" else listing
    return f"---\nsearch: {{exclude: true}}\n---\n\n{shown}"


def _notebook(text: str) -> str:
    """The cells of a notebook, with what they print and draw."""
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            if printed := "".join(output.get("text", ())):
                parts.append(f"```text\n{printed}```")
            if picture := "".join(output.get("data", {}).get("image/png", ())):
                parts.append(f'<img alt="What the cell draws" src="data:image/png;base64,{picture.strip()}">')
    return "\n\n".join(parts)


def _between_fences(markdown: str, change) -> str:
    """The text with everything changed but its code blocks."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _nested_lists(text: str) -> str:
    """Python-Markdown wants four spaces before a nested item and its lines, where others are content with two."""
    blocks = text.split("\n\n")
    nested = re.compile(r"^ {2}(?=- | {2}\S)", re.MULTILINE)
    return "\n\n".join(nested.sub("    ", block) if block.startswith("- ") else block for block in blocks)
