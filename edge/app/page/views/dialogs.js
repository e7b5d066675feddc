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

/** Puts a menu under its button, or above it where there is more room; it scrolls where it is higher than that. */
function place(list, button) {
  const around = button.getBoundingClientRect();
  const { width, height } = list.getBoundingClientRect();
  const [above, below] = [around.top - 12, innerHeight - around.bottom - 12];
  const under = height <= below || below >= above;
  list.style.setProperty("max-height", `${under ? below : above}px`);
  list.style.setProperty("top", `${under ? around.bottom + 4 : Math.max(8, around.top - height - 4)}px`);
  list.style.setProperty("left", `${Math.max(8, Math.min(around.left, innerWidth - width - 8))}px`);
}

function MenuEntry({ item, onChoose, onLeave }) {
  const choice = item.checked !== undefined;
  const role = choice ? "menuitemradio" : "menuitem";
  const content = html`${item.icon && html`<${Icon} name=${item.icon} />`}<span>${item.label}</span>`;
  if (item.href) return html`<a role=${role} tabindex="-1" href=${item.href} onClick=${onLeave}>${content}</a>`;
  return html`<button
    type="button"
    role=${role}
    aria-checked=${choice ? item.checked : undefined}
    tabindex="-1"
    class=${item.danger ? "danger" : ""}
    onClick=${onChoose}
  >
    ${content}
  </button>`;
}

/**
 * A button that opens a menu, whose entries the arrow keys go through; Escape gives the focus back to the button.
 *
 * @param {object} props
 * @param {string} props.label of the button
 * @param {() => {label: any, icon?: string, run?: () => void, href?: string, checked?: boolean, danger?: boolean}[]} props.items
 *   entries that do something, lead to an address, or are one of a choice
 * @param {any} [props.children] what the button shows instead of three points
 */
export function Menu({ label, items, className = "icon-button", children, ...rest }) {
  const [open, setOpen] = useState(false);
  const button = useRef(null);
  const list = useRef(null);
  const wasOpen = useRef(false);

  useLayoutEffect(() => {
    if (!open) return undefined;
    const element = list.current;
    element.showPopover();
    place(element, button.current);
    (element.querySelector("[aria-checked=true]") ?? element.querySelector("[role^=menuitem]"))?.focus();
    // Unlike `toggle`, this event comes before the next key or click, which may open the menu again.
    const closes = (event) => {
      if (event.newState !== "closed") return;
      if (element.contains(document.activeElement) || document.activeElement === document.body) button.current?.focus();
      setOpen(false);
    };
    element.addEventListener("beforetoggle", closes);
    return () => element.removeEventListener("beforetoggle", closes);
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
  const choose = (item) => {
    button.current.focus(); // so that a dialog that an entry opens gives the focus back to the button
    setOpen(false);
    item.run();
  };
  return html`<button
      ...${rest}
      ref=${button}
      type="button"
      class=${className}
      aria-label=${label}
      title=${label}
      aria-haspopup="menu"
      aria-expanded=${open}
      onPointerDown=${() => (wasOpen.current = open)}
      onClick=${() => {
        setOpen(!wasOpen.current);
        wasOpen.current = false;
      }}
    >
      ${children ?? html`<${Icon} name="more" />`}
    </button>
    ${open &&
    html`<div ref=${list} popover="auto" role="menu" class="menu" aria-label=${label} onKeyDown=${move}>
      ${items().map(
        (item, index) =>
          html`<${MenuEntry} key=${index} item=${item} onChoose=${() => choose(item)} onLeave=${() => setOpen(false)} />`,
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
