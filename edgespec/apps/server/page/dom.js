// Makes elements. A string becomes text, never markup.

/** Return a new element `tag` with these properties and children, each a node or a string. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/**
 * Make the children of `parent` from the `from`th on those of `fresh`. What is the same stays, and text that became
 * longer grows in place: so what the reader has selected stays selected, and a button under the pointer stays one.
 */
export function patch(parent, fresh, from = 0) {
  for (const [i, node] of fresh.entries()) {
    const old = parent.childNodes[from + i];
    if (!old) parent.append(node);
    else if (!old.isEqualNode(node)) patchNode(old, node);
  }
  while (parent.childNodes.length > from + fresh.length) parent.lastChild.remove();
}

function patchNode(old, node) {
  if (old.nodeType === Node.TEXT_NODE && node.nodeType === Node.TEXT_NODE && node.data.startsWith(old.data)) {
    old.appendData(node.data.slice(old.data.length));
  } else if (old.nodeType === Node.ELEMENT_NODE && old.cloneNode().isEqualNode(node.cloneNode())) {
    patch(old, [...node.childNodes]);
  } else old.replaceWith(node);
}

/** Copy `text`, and let `button` say so for a while. */
export async function copyFrom(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // none on a page that came from another machine without TLS; what is selected can be copied even there
    const area = element("textarea", { className: "hidden", value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus({ preventScroll: true });
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}
