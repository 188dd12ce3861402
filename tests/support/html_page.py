"""What is wrong with a page: nesting, links outside, drawings and tables without words."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise

_VOID = {"meta", "link", "br", "img", "hr", "input"}
_LINKS = ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
_EMPTY_SVG = {"rect", "polyline", "path", "line", "circle"}  # written <rect/>
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")


@dataclass
class Element:
    tag: str
    attrs: dict[str, str]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def find(self, tag: str) -> list[Element]:
        own = [self] if self.tag == tag else []
        return own + [found for child in self.children for found in child.find(tag)]


class Page(HTMLParser):
    """Elements of a page as a tree, and what is wrong with them in `problems`."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]
        self.problems: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        if len(self.open) > 1:
            self.problems.append(f"never closed: {[e.tag for e in self.open[1:]]}")
        self._check()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = self._added(tag, attrs)
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID | _EMPTY_SVG:
            self.problems.append(f"<{tag}/> is not closed in HTML")
        self._added(tag, attrs)

    def _added(self, tag: str, attrs: list[tuple[str, str | None]]) -> Element:
        names = [name for name, _ in attrs]
        if len(set(names)) < len(names):
            self.problems.append(f"<{tag}> has an attribute twice: {names}")
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if "id" in element.attrs:
            self.ids.append(element.attrs["id"])
        return element

    def handle_endtag(self, tag: str) -> None:
        if self.open[-1].tag != tag:
            self.problems.append(f"</{tag}> closes <{self.open[-1].tag}>")
            return
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data

    def all(self, *tags: str) -> list[Element]:
        return [element for tag in tags for element in self.root.find(tag)]

    def _check(self) -> None:
        self._check_links()
        self._check_words()
        self._check_tables()
        levels = [int(tag[1]) for tag in self._in_order(self.root) if tag in _HEADINGS]
        jumps = [b for a, b in pairwise(levels) if b > a + 1]
        if levels[:1] != [1] or levels.count(1) != 1 or jumps:
            self.problems.append(f"headings do not nest: {levels}")
        if len(set(self.ids)) < len(self.ids):
            self.problems.append("an id occurs twice")

    def _in_order(self, element: Element) -> list[str]:
        return [element.tag, *(t for child in element.children for t in self._in_order(child))]

    def _check_links(self) -> None:
        for element in self._elements(self.root):
            for name in _LINKS:
                link = element.attrs.get(name)
                if link is None or link == "data:,":
                    continue
                if not link.startswith("#") or link[1:] not in self.ids:
                    self.problems.append(f"<{element.tag} {name}={link!r}> leads out of the page")
            if any(name.startswith("on") for name in element.attrs):
                self.problems.append(f"<{element.tag}> has a handler")
            if "url(" in element.attrs.get("style", "") + element.text * (element.tag == "style"):
                self.problems.append("a style loads something")
        for tag in ("script", "iframe", "object", "embed", "form", "base"):
            if self.all(tag):
                self.problems.append(f"<{tag}> is in the page")

    def _elements(self, element: Element) -> list[Element]:
        return [element, *(e for child in element.children for e in self._elements(child))]

    def _check_words(self) -> None:
        for element in self.all("svg", "img"):
            attrs = element.attrs
            named = attrs.get("role") == "img" and attrs.get("aria-label", "").strip()
            if not (named or attrs.get("alt") or attrs.get("aria-hidden") == "true"):
                self.problems.append(f"<{element.tag}> has no words: {attrs}")
        for tag in ("header", "main", "footer"):
            if len(self.all(tag)) != 1:
                self.problems.append(f"not one <{tag}>")
        if not self.all("html") or self.all("html")[0].attrs.get("lang") != "en":
            self.problems.append("no language")
        for element in self.all("a", "summary", "h1", "h2", "h3", "th", "caption"):
            if not element.text.strip():
                self.problems.append(f"an empty <{element.tag}>")

    def _check_tables(self) -> None:
        for table in self.all("table"):
            if len(table.find("caption")) != 1:
                self.problems.append(f"a table has no caption: {table.text[:60]!r}")
            if any(cell.attrs.get("scope") not in ("col", "row") for cell in table.find("th")):
                self.problems.append(f"a heading of a table has no scope: {table.text[:60]!r}")
            rows = [len(r.find("td")) + len(r.find("th")) for r in table.find("tr")]
            if len(set(rows)) != 1 or not any(r.find("th") for r in table.find("tr")):
                self.problems.append(f"rows of a table differ: {set(rows)} {table.text[:60]!r}")
