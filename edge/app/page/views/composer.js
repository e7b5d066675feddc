/** Where a message is written: text, attached files and images, sending and stopping. */

import { html, useCallback, useLayoutEffect, useRef, useState } from "edgerun/preact";

import { countTokens, keepImage } from "../api.js";
import { readDraft, writeDraft } from "../drafts.js";
import { Icon } from "../icons.js";
import {
  answerInProgress,
  attempt,
  modelOf,
  notify,
  openConversation,
  pathOf,
  sendMessage,
  state,
  stopAnswer,
  useStore,
} from "../store.js";
import { strings } from "../strings.js";
import { CameraDialog } from "./camera.js";
import { ContextMeter } from "./context_meter.js";
import { IconButton } from "./dialogs.js";

const DRAFT_DELAY = 250;
const LARGEST_FILE = 4_000_000;
const CHARACTERS_PER_TOKEN = 8; // more than tokens have
const MOST_FILES = 20;
const IMAGE = /^image\/(?!svg)/; // an SVG file is text
const GROWS_BY_ITSELF = CSS.supports("field-sizing", "content");

/** Reads a file as text; raises where it is too large or is not text. */
async function readTextFile(file) {
  if (file.size > LARGEST_FILE) throw new Error(strings.composer.tooLarge(file.name, file.size, LARGEST_FILE));
  const bytes = await file.arrayBuffer();
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error(strings.composer.notText(file.name));
  }
  if (text.includes("\0")) throw new Error(strings.composer.notText(file.name));
  return { name: file.name, text: text.replaceAll("\r\n", "\n") };
}

/** Reads an image as it is kept with a message; raises where it is too large or cannot be read. */
async function readImage(file) {
  const reader = new FileReader();
  const read = new Promise((resolve, reject) => {
    reader.onload = resolve;
    reader.onerror = () => reject(reader.error);
  });
  reader.readAsDataURL(file);
  await read;
  return { name: file.name, text: "", ...(await keepImage(file.name, reader.result)) };
}

async function tokensOf(conversation, text) {
  const model = modelOf(conversation);
  if (!model?.loaded) return null;
  try {
    return (await countTokens(model.id, text)).tokens;
  } catch {
    return null; // the size in bytes is shown instead
  }
}

function Attached({ files, context, onRemove }) {
  if (!files.length) return null;
  const isLong = (file) => context && (file.tokens ?? file.text.length / CHARACTERS_PER_TOKEN) >= context;
  return html`<ul class="attached" aria-label=${strings.composer.attachments}>
    ${files.map(
      (file, index) =>
        html`<li key=${`${file.name} ${index}`}>
          ${file.image ? html`<img class="thumbnail" src=${file.image} alt="" />` : html`<${Icon} name="attach" />`}
          <span class="attached-name">${file.name}</span>
          ${!file.image &&
          html`<span class="quiet"
            >${strings.common.size(file.text.length)}${file.tokens != null ? ` · ${strings.common.tokens(file.tokens)}` : ""}</span
          >`}
          ${isLong(file) && html`<span class="quiet">${strings.composer.inPassages}</span>`}
          <${IconButton} icon="close" label=${strings.composer.removeFile(file.name)} onClick=${() => onRemove(index)} />
        </li>`,
    )}
  </ul>`;
}

function useDropZone(add) {
  const [over, setOver] = useState(false);
  useLayoutEffect(() => {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    const drag = (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setOver(true);
    };
    const leave = (event) => event.relatedTarget === null && setOver(false);
    const drop = (event) => {
      setOver(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      add([...event.dataTransfer.files]);
    };
    addEventListener("dragover", drag);
    addEventListener("dragleave", leave);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", drag);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", drop);
    };
  }, [add]);
  return over;
}

/** The composer of the conversation `id`, or of a new one for null. What is typed is kept until it is sent. */
export function Composer({ id, conversation, leaf }) {
  const area = useRef(null);
  const picker = useRef(null);
  const draft = useRef(null);
  draft.current ??= readDraft(id);
  const [files, setFiles] = useState(draft.current.attachments);
  const [empty, setEmpty] = useState(!draft.current.text.trim());
  const [edits, setEdits] = useState(0);
  const [sending, setSending] = useState(false);
  const [camera, setCamera] = useState(false);
  const enterSends = useStore((current) => current.settings.enter_sends);
  const writing = useStore(() => (id ? answerInProgress(id)?.id : undefined));
  const context = useStore(() => modelOf(conversation)?.context);
  const sees = useStore(() => modelOf(conversation)?.capabilities.includes("vision"));
  const timer = useRef(0);

  const grow = useCallback(() => {
    if (GROWS_BY_ITSELF) return;
    area.current.style.setProperty("height", "auto");
    area.current.style.setProperty("height", `${area.current.scrollHeight + 2}px`);
  }, []);
  const keep = useCallback(() => {
    clearTimeout(timer.current);
    writeDraft(id, draft.current.text, draft.current.attachments);
  }, [id]);
  const change = useCallback(
    (text, attachments = draft.current.attachments) => {
      draft.current = { text, attachments };
      setEmpty(!text.trim() && !attachments.length);
      clearTimeout(timer.current);
      timer.current = setTimeout(() => {
        keep();
        setEdits((count) => count + 1);
      }, DRAFT_DELAY);
    },
    [keep],
  );
  const setText = (text) => {
    area.current.value = text;
    grow();
    change(text);
  };
  const changeFiles = useCallback(
    (next) => {
      setFiles(next);
      change(area.current.value, next);
    },
    [change],
  );
  const add = useCallback(
    async (chosen) => {
      for (const file of chosen.slice(0, MOST_FILES)) {
        try {
          const isImage = IMAGE.test(file.type);
          const read = await (isImage ? readImage(file) : readTextFile(file));
          const tokens = isImage ? null : await tokensOf(conversation, read.text);
          changeFiles([...draft.current.attachments, { ...read, tokens }]);
        } catch (error) {
          notify({ text: error.message, kind: "error" });
        }
      }
    },
    [changeFiles, conversation],
  );
  const over = useDropZone(add);

  useLayoutEffect(() => {
    area.current.value = draft.current.text;
    setEmpty(!draft.current.text.trim() && !draft.current.attachments.length);
    grow();
    if (matchMedia("(hover: hover)").matches && !state.dialog) area.current.focus();
    addEventListener("pagehide", keep);
    return () => {
      keep();
      removeEventListener("pagehide", keep);
    };
  }, [keep]);

  const send = async () => {
    const { text, attachments } = draft.current;
    if (sending || (!text.trim() && !attachments.length)) return;
    if (writing) {
      notify({ text: strings.composer.stopFirst });
      return;
    }
    setSending(true);
    const sent = await attempt(() =>
      sendMessage(
        id,
        text,
        attachments.map(({ name, text, image }) => ({ name, text, image })),
      ),
    );
    setSending(false);
    if (!sent) return; // the text stays where it is, with the error beside it
    // What was written while the message was under way is the next one.
    const { text: now, attachments: attached } = draft.current;
    const rest = now.startsWith(text) ? now.slice(text.length) : now;
    const others = attached.filter((file) => !attachments.includes(file));
    draft.current = id === null ? { text: "", attachments: [] } : { text: rest, attachments: others };
    keep();
    if (id === null) writeDraft(sent, rest, others);
    if (!area.current) return; // the reader has gone elsewhere
    if (id === null) openConversation(sent);
    else {
      setFiles(others);
      setText(rest);
      area.current.focus();
    }
  };
  const press = (event) => {
    if (event.isComposing) return;
    if (event.key === "ArrowUp" && !area.current.value && id && !event.altKey) {
      const tree = state.trees.get(id);
      const own = pathOf(id).findLast((message) => tree.messages.get(message).role === "user");
      if (!own) return;
      event.preventDefault();
      document.querySelector(`[data-message="${CSS.escape(own)}"]`)?.focus();
    }
    if (event.key !== "Enter" || event.altKey) return;
    const wanted = event.ctrlKey || event.metaKey || (enterSends ? !event.shiftKey : false);
    if (!wanted) return;
    event.preventDefault();
    send();
  };
  const paste = (event) => {
    const chosen = [...event.clipboardData.files];
    if (!chosen.length || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    add(chosen);
  };
  const submit = (event) => {
    event.preventDefault();
    send();
  };
  const stop = () => attempt(() => stopAnswer(id));
  return html`<form class=${over ? "composer over" : "composer"} onSubmit=${submit} aria-label=${strings.composer.label}>
    ${over && html`<div class="drop-hint">${strings.composer.drop}</div>`}
    <${Attached} files=${files} context=${context} onRemove=${(index) => changeFiles(files.toSpliced(index, 1))} />
    <textarea
      id="composer-text"
      ref=${area}
      rows="1"
      aria-label=${strings.composer.textLabel}
      placeholder=${strings.composer.placeholder}
      onInput=${(event) => {
        grow();
        change(event.target.value);
      }}
      onKeyDown=${press}
      onPaste=${paste}
    ></textarea>
    <div class="composer-bar">
      <${IconButton} icon="attach" label=${strings.composer.attach} onClick=${() => picker.current.click()} />
      <input
        ref=${picker}
        type="file"
        multiple
        hidden
        aria-label=${strings.composer.attach}
        onChange=${(event) => {
          add([...event.target.files]);
          event.target.value = "";
        }}
      />
      ${sees &&
      navigator.mediaDevices &&
      html`<${IconButton} icon="camera" label=${strings.composer.camera} onClick=${() => setCamera(true)} />`}
      ${camera && html`<${CameraDialog} onTaken=${(file) => add([file])} onClose=${() => setCamera(false)} />`}
      <span class="composer-hint quiet">${enterSends ? strings.composer.hintEnter : strings.composer.hintCtrlEnter}</span>
      <${ContextMeter} id=${id} leaf=${leaf} draft=${draft} edits=${edits} writing=${writing} />
      ${writing
        ? html`<button type="button" class="button primary round" aria-label=${strings.composer.stop} title=${strings.composer.stop} onClick=${stop}>
            <${Icon} name="stop" />
          </button>`
        : html`<button class="button primary round" aria-label=${strings.composer.send} title=${strings.composer.send} disabled=${empty || sending}>
            <${Icon} name="send" />
          </button>`}
    </div>
  </form>`;
}
