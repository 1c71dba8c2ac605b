"""What every view of the page keeps to: nothing is wider than the window, text can be read, keys reach all actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

MIN_CONTRAST = 4.5  # of text to what is behind it (WCAG 2.1, AA)
MIN_LARGE_CONTRAST = 3.0  # from 24 pixels on, or bold from 18.66

# Elements that are wider inside than outside, but for those that are made to be moved sideways.
_WIDE = """() => [...document.querySelectorAll("html, body, main, main *")].filter(at => {
  const style = getComputedStyle(at);
  const moved = ["auto", "scroll"].includes(style.overflowX) && !at.matches("html, main, .tab, section, .column");
  return at.scrollWidth > at.clientWidth + 1 && at.clientWidth > 0 && style.display !== "inline" && !moved
    && style.overflowX !== "hidden" && !at.closest(".xterm, .unseen, svg") && !at.matches("html *:has(.scroll, .tabs)");
}).map(at => `${at.tagName}.${at.className}: ${at.scrollWidth} > ${at.clientWidth}`)"""

# Texts whose contrast is too low, by the colours that are computed for them.
_PALE = """([least, large]) => {
  const canvas = document.createElementNS("http://www.w3.org/1999/xhtml", "canvas").getContext("2d");
  const known = new Map();
  const rgba = text => {
    if (!known.has(text)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = text;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(text, [r, g, b, a / 255]);
    }
    return known.get(text);
  };
  const over = (top, under) => top.slice(0, 3).map((part, at) => part * top[3] + under[at] * (1 - top[3])).concat(1);
  const behind = at => {
    if (!at) return [255, 255, 255, 1];
    const own = rgba(getComputedStyle(at).backgroundColor);
    return own[3] === 1 ? own : over(own, behind(at.parentElement));
  };
  const light = ([r, g, b]) => {
    const part = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const at = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !at.checkVisibility() || at.closest(":disabled, .xterm, script, style, option, .unseen")) continue;
    const style = getComputedStyle(at), size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const back = behind(at), front = over(rgba(style.color), back);
    const [low, high] = [light(back), light(front)].sort((one, other) => one - other);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (size >= 24 || (bold && size >= 18.66) ? large : least))
      found.add(`${ratio.toFixed(2)} ${at.tagName}.${at.className} "${text.slice(0, 30)}"`);
  }
  return [...found];
}"""

# What can be clicked, marked by a number. What only looks so counts too, but in a list that arrow keys walk.
_ACTIONS = """() => {
  const own = "a[href], button, input, select, textarea, summary, [tabindex='0']";
  const looks = at => getComputedStyle(at).cursor === "pointer"
    && !at.closest("a, button, label, [role='listbox'], [aria-hidden]");
  const actions = [...document.querySelectorAll("*")].filter(at =>
    at.checkVisibility({ visibilityProperty: true }) && !at.matches(":disabled, option") && !at.closest(".xterm")
    && (at.matches(own) || looks(at)));
  actions.forEach((at, number) => { at.dataset.action = number; });
  return actions.map(at => `${at.tagName}.${at.className} ${(at.textContent || at.ariaLabel || "").slice(0, 40)}`);
}"""


def wide(page: Page) -> list[str]:
    """What is wider than it may be."""
    result: list[str] = page.evaluate(_WIDE)
    return result


def pale(page: Page) -> list[str]:
    """Texts that are hard to read."""
    result: list[str] = page.evaluate(_PALE, [MIN_CONTRAST, MIN_LARGE_CONTRAST])
    return result


def unreached(page: Page) -> list[str]:
    """Actions that the Tab key does not come to."""
    actions: list[str] = page.evaluate(_ACTIONS)
    page.evaluate("() => { document.activeElement?.blur(); getSelection().removeAllRanges(); }")
    reached: set[int] = set()
    for _ in range(2 * len(actions) + 5):
        page.keyboard.press("Tab")
        number = page.evaluate("document.activeElement?.dataset.action")
        if number is not None and int(number) in reached and len(reached) == len(actions):
            break
        if number is not None:
            reached.add(int(number))
    return [action for number, action in enumerate(actions) if number not in reached]
