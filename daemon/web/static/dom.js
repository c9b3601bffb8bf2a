// Elements made without markup, so that a peer's name can inject none.

/** Makes an element; `properties` are set as properties, those with a dash as attributes. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Sets a node's text if it differs, because an unchanged page needs no layout. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets or removes an attribute if it differs. */
export function mark(node, name, value) {
  if (value === null || value === undefined || value === "") node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export const byId = (id) => document.getElementById(id);

/** Limits `draw` to one call a frame, and none while the page is hidden. */
export function onceAFrame(draw) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      draw();
    });
  };
}

/** Makes a button that copies a text; where the clipboard does not work it says so. */
export function copyButton(text, title = "Copy") {
  const button = element("button", { type: "button", className: "plain", textContent: title });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      say(button, "Copied");
    } catch {
      say(button, "Select it and press Ctrl+C"); // the clipboard works only on https or loopback
    }
  });
  return button;
}

const TOAST_MS = 6000;

/** Shows a short message for a few seconds; screen readers read it out. */
export function toast(text, tone = "ok") {
  const node = element("p", { className: "toast", textContent: text });
  node.dataset.tone = tone;
  byId("toasts").append(node);
  setTimeout(() => node.remove(), TOAST_MS);
}
