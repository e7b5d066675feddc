/** Dialogs, menus and buttons that all views use. */

import { html, useEffect, useId, useLayoutEffect, useRef, useState } from "edgerun/preact";

import { Icon } from "../icons.js";
import { strings } from "../strings.js";

/** A button of an icon alone, with its label for screen readers and as a tooltip. */
export function IconButton({ icon, label, className = "", ...rest }) {
  return html`<button type="button" class=${`icon-button ${className}`} aria-label=${label} title=${label} ...${rest}>
    <${Icon} name=${icon} />
  </button>`;
}

/**
 * A modal dialog. Escape, the close button and a click beside it call `onClose`; the focus goes back to where it was.
 *
 * @param {object} props
 * @param {string} props.title
 * @param {() => void} props.onClose
 * @param {string} [props.className]
 */
export function Dialog({ title, onClose, className = "", children }) {
  const dialog = useRef(null);
  const heading = useId();
  useLayoutEffect(() => {
    const before = document.activeElement;
    const element = dialog.current;
    element.showModal();
    element.querySelector("[data-autofocus]")?.focus();
    return () => {
      element.close();
      if (before instanceof HTMLElement && before.isConnected) before.focus();
    };
  }, []);
  const cancel = (event) => {
    event.preventDefault();
    onClose();
  };
  const press = (event) => event.target === dialog.current && onClose();
  return html`<dialog
    ref=${dialog}
    class=${`dialog ${className}`}
    aria-labelledby=${heading}
    onCancel=${cancel}
    onMouseDown=${press}
  >
    <div class="dialog-body">
      <header class="dialog-header">
        <h2 id=${heading}>${title}</h2>
        <${IconButton} icon="close" label=${strings.common.close} onClick=${onClose} />
      </header>
      ${children}
    </div>
  </dialog>`;
}

/**
 * A dialog that asks for one line of text.
 *
 * @param {object} props
 * @param {string[]} [props.choices] offered while typing
 * @param {boolean} [props.optional] whether an empty line is an answer
 */
export function PromptDialog({ title, label, value = "", save, choices = [], optional = false, onSave, onClose }) {
  const [text, setText] = useState(value);
  const list = useId();
  const submit = (event) => {
    event.preventDefault();
    if (!text.trim() && !optional) return;
    onClose();
    onSave(text.trim());
  };
  return html`<${Dialog} title=${title} onClose=${onClose} className="dialog-small">
    <form onSubmit=${submit} class="stack">
      <label class="field"
        ><span>${label}</span>
        <input
          data-autofocus
          value=${text}
          maxlength="200"
          list=${choices.length ? list : undefined}
          onFocus=${(event) => event.target.select()}
          onInput=${(event) => setText(event.target.value)}
        />
      </label>
      ${choices.length > 0 && html`<datalist id=${list}>${choices.map((name) => html`<option value=${name} />`)}</datalist>`}
      <div class="dialog-actions">
        <button type="button" class="button" onClick=${onClose}>${strings.common.cancel}</button>
        <button class="button primary">${save}</button>
      </div>
    </form>
  <//>`;
}

function place(list, button) {
  const around = button.getBoundingClientRect();
  const own = list.getBoundingClientRect();
  const below = around.bottom + own.height + 8 < innerHeight;
  const top = below ? around.bottom + 4 : Math.max(8, around.top - own.height - 4);
  const left = Math.min(Math.max(8, around.right - own.width), innerWidth - own.width - 8);
  list.style.setProperty("top", `${top}px`);
  list.style.setProperty("left", `${left}px`);
}

/**
 * What opens a popover with entries, moves between them by key, and gives the focus back to its button.
 *
 * @param {(list: HTMLElement, button: HTMLElement) => void} position sets where the list is shown
 * @returns {{open: boolean, close: () => void, leave: () => void, button: object, list: object}} `close` ends the menu,
 *   `leave` gives the focus back first; `button` and `list` are the properties of the two elements
 */
export function useMenu(position) {
  const [open, setOpen] = useState(false);
  const button = useRef(null);
  const list = useRef(null);
  const wasOpen = useRef(false);

  useLayoutEffect(() => {
    if (!open) return undefined;
    const element = list.current;
    element.showPopover();
    position(element, button.current);
    (element.querySelector("[aria-checked=true]") ?? element.querySelector("[role^=menuitem]"))?.focus();
    const toggled = (event) => {
      if (event.newState !== "closed") return;
      if (element.contains(document.activeElement) || document.activeElement === document.body) button.current?.focus();
      setOpen(false);
    };
    element.addEventListener("toggle", toggled);
    return () => element.removeEventListener("toggle", toggled);
  }, [open]);

  const move = (event) => {
    const entries = [...list.current.querySelectorAll("[role^=menuitem]")];
    const at = entries.indexOf(document.activeElement);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1 + entries.length, Home: 0, End: entries.length - 1 }[event.key];
    if (event.key === "Tab") list.current.hidePopover();
    if (event.key === "Escape") event.stopPropagation();
    if (next === undefined) return;
    event.preventDefault();
    entries[next % entries.length].focus();
  };
  const close = () => setOpen(false);
  return {
    open,
    close,
    leave: () => {
      button.current.focus(); // so that a dialog that an entry opens gives the focus back to the button
      close();
    },
    button: {
      ref: button,
      type: "button",
      "aria-haspopup": "menu",
      "aria-expanded": open,
      onPointerDown: () => (wasOpen.current = open),
      onClick: () => {
        setOpen(!wasOpen.current);
        wasOpen.current = false;
      },
    },
    list: { ref: list, popover: "auto", role: "menu", onKeyDown: move },
  };
}

/**
 * A button that opens a menu.
 *
 * @param {object} props
 * @param {string} props.label of the button
 * @param {() => {label: string, icon?: string, run: () => void, danger?: boolean}[]} props.items
 */
export function Menu({ label, items, icon = "more", className = "" }) {
  const menu = useMenu(place);
  const choose = (item) => {
    menu.leave();
    item.run();
  };
  return html`<button ...${menu.button} class=${`icon-button ${className}`} aria-label=${label} title=${label}>
      <${Icon} name=${icon} />
    </button>
    ${menu.open &&
    html`<div ...${menu.list} class="menu" aria-label=${label}>
      ${items().map(
        (item) =>
          html`<button
            key=${item.label}
            type="button"
            role="menuitem"
            tabindex="-1"
            class=${item.danger ? "danger" : ""}
            onClick=${() => choose(item)}
          >
            ${item.icon && html`<${Icon} name=${item.icon} />`}${item.label}
          </button>`,
      )}
    </div>`}`;
}

/** Copies text; gives false where the browser refuses. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** A button that copies, and says for a moment that it has. */
export function CopyButton({ text, label = strings.common.copy }) {
  const [copied, setCopied] = useState(false);
  useEffect(() => {
    if (!copied) return undefined;
    const timer = setTimeout(() => setCopied(false), 1500);
    return () => clearTimeout(timer);
  }, [copied]);
  const copy = async () => setCopied(await copyText(text()));
  return html`<${IconButton} icon=${copied ? "check" : "copy"} label=${copied ? strings.common.copied : label} onClick=${copy} />`;
}
