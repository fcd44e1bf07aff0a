// Makes elements. A string becomes text, never markup.

/** Return a new element `tag` with these properties and children, each a node or a string. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
