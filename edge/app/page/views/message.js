/** One message with its reasoning, state, statistics and actions. */

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "edgerun/preact";

import { Icon } from "../icons.js";
import { CodeBlock } from "../markdown/code.js";
import { Markdown } from "../markdown.js";
import { splitReasoning } from "../reasoning.js";
import {
  attempt,
  branchAtToken,
  continueAnswer,
  deleteMessage,
  editMessage,
  memo,
  regenerate,
  selectBranch,
  set,
  state,
  useStore,
} from "../store.js";
import { strings } from "../strings.js";
import { CallList, awaitsDecision, hasOpenCalls } from "./calls.js";
import { CopyButton, IconButton, Menu, copyText } from "./dialogs.js";
import { Passages } from "./passages.js";
import { TokenView } from "./tokens.js";

const FOLDED_FROM = 4000;
/** Numbers of answers to choose from. */
const SEVERAL = [2, 3, 4, 8];

/**
 * The text of an answer. Far from the view, and until the models are known, it is plain text, which can be searched: formatting hundreds of messages
 * that nobody looks at would hold up the first look.
 */
function Answer({ text, writing, bundled, near }) {
  if (!near && !writing) return html`<div class="plain">${text}</div>`;
  // The bundled model writes shell commands: as Markdown, their asterisks would be emphasis.
  if (bundled) return html`<div class="md"><${CodeBlock} code=${text.trim()} language="bash" open=${writing} /></div>`;
  return html`<${Markdown} text=${text} writing=${writing} />`;
}

function Reasoning({ text, finished, writing }) {
  const started = useRef(null);
  const [seconds, setSeconds] = useState(null);
  const running = writing && !finished;
  useEffect(() => {
    if (!running) return undefined;
    started.current ??= performance.now();
    const timer = setInterval(() => setSeconds(Math.round((performance.now() - started.current) / 1000)), 1000);
    return () => clearInterval(timer);
  }, [running]);
  const words = useMemo(() => (text.match(/\S+/g) ?? []).length, [text]);
  return html`<details class="reasoning">
    <summary>
      <${Icon} name="right" />${running ? strings.message.thinking(seconds) : strings.message.thought(words, seconds)}
    </summary>
    <div class="reasoning-text">${text.trim()}</div>
  </details>`;
}

function Attachments({ attachments }) {
  return html`<ul class="attachments" aria-label=${strings.message.attachments}>
    ${attachments.map(
      (file) =>
        html`<li key=${file.name}>
          ${file.image && html`<img src=${file.image} alt=${file.name} />`}
          <details hidden=${Boolean(file.image)}>
            <summary><${Icon} name="attach" />${file.name}<span class="quiet">${strings.common.size(file.text.length)}</span></summary>
            <pre tabindex="0">${file.text.slice(0, 20000)}</pre>
          </details>
        </li>`,
    )}
  </ul>`;
}

function UserText({ text }) {
  const [whole, setWhole] = useState(text.length < FOLDED_FROM);
  return html`<div class="user-text" dir="auto">${whole ? text : `${text.slice(0, FOLDED_FROM / 2)} …`}</div>
    ${!whole &&
    html`<button type="button" class="button small" onClick=${() => setWhole(true)}>
      ${strings.message.showAll(text.length)}
    </button>`}`;
}

function Editor({ message, onClose }) {
  const [text, setText] = useState(message.content);
  const user = message.role === "user";
  const area = useRef(null);
  useLayoutEffect(() => {
    area.current.focus();
    area.current.setSelectionRange(text.length, text.length);
  }, []);
  const save = (branch) => {
    onClose();
    attempt(() => editMessage(message, text, branch));
  };
  const press = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      event.preventDefault();
      onClose();
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && text.trim()) {
      event.preventDefault();
      save(true);
    }
  };
  return html`<div class="editor" onKeyDown=${press}>
    <textarea
      ref=${area}
      aria-label=${strings.message.editLabel}
      value=${text}
      onInput=${(event) => setText(event.target.value)}
    ></textarea>
    <div class="editor-actions">
      <span class="quiet">${user ? strings.message.editHint : strings.message.editAnswerHint}</span>
      <button type="button" class="button small" onClick=${onClose}>${strings.common.cancel}</button>
      <button type="button" class="button small" disabled=${!text.trim()} onClick=${() => save(false)}>
        ${strings.message.justSave}
      </button>
      <button type="button" class="button small primary" disabled=${!text.trim()} onClick=${() => save(true)}>
        ${user ? strings.message.saveAndAnswer : strings.message.saveAsBranch}
      </button>
    </div>
  </div>`;
}

function BranchSwitcher({ message, siblings }) {
  const at = siblings.indexOf(message.id);
  const show = (index) => {
    const other = state.trees.get(message.conversation)?.messages.get(siblings[index]);
    if (other) attempt(() => selectBranch(other));
  };
  return html`<span class="branches" role="group" aria-label=${strings.message.branches}>
    <${IconButton} icon="left" label=${strings.message.previousBranch} disabled=${at === 0} onClick=${() => show(at - 1)} />
    <span aria-live="polite"><span aria-hidden="true">${at + 1} / ${siblings.length}</span
      ><span class="visually-hidden">${strings.message.branchOf(at + 1, siblings.length)}</span></span
    >
    <${IconButton}
      icon="right"
      label=${strings.message.nextBranch}
      disabled=${at === siblings.length - 1}
      onClick=${() => show(at + 1)}
    />
  </span>`;
}

function Progress({ id }) {
  const progress = useStore((current) => current.progress.get(id));
  const known = progress?.fraction != null;
  const percent = known ? Math.floor(progress.fraction * 100) : null;
  return html`<div class="progress-line">
    ${known
      ? html`<progress max="100" value=${percent} aria-label=${strings.message.stage(progress.stage)}></progress>`
      : html`<span class="typing" aria-hidden="true"><i></i><i></i><i></i></span>`}
    <span>${progress ? strings.message.stage(progress.stage) : strings.message.waiting}${known ? ` ${percent} %` : ""}</span>
  </div>`;
}

function Statistics({ message }) {
  const shown = useStore((current) => current.settings.show_statistics);
  const numbers = message.state === "writing" ? message.rate : message.stats;
  if (!shown || !numbers || !numbers.tokens) return null;
  return html`<span class="statistics" title=${strings.common.tokensAbout}>${strings.message.statistics(numbers)}</span>`;
}

function outcomeOf(message) {
  return message.state === "length" && hasOpenCalls(message) ? strings.message.callLimit : strings.message[message.state];
}

/** What an answer wrote before its calls, and the calls. */
function Round({ message, round, ...rest }) {
  const { reasoning, answer } = splitReasoning(round.text);
  return html`${reasoning !== null && html`<${Reasoning} text=${reasoning} finished writing=${false} />`}
    ${answer && html`<${Answer} text=${answer} writing=${false} ...${rest} />`}
    <${CallList} message=${message} calls=${round.calls} />`;
}

function Outcome({ message }) {
  const again = () => attempt(() => continueAnswer(message));
  const retry = () => attempt(() => regenerate(message));
  if (!["stopped", "length", "failed", "interrupted"].includes(message.state)) return null;
  const failed = message.state === "failed";
  return html`<div class=${`outcome ${message.state}`}>
    <${Icon} name=${failed ? "warning" : "stop"} />
    <span>${failed ? message.error || strings.message.failed : outcomeOf(message)}</span>
    ${failed
      ? html`<button type="button" class="button small" onClick=${retry}>${strings.message.retry}</button>`
      : html`<button type="button" class="button small" onClick=${again}>${strings.message.continue}</button>`}
  </div>`;
}

function Actions({ message, siblings, onEdit, inspecting, onInspect }) {
  const user = message.role === "user";
  const entries = {
    edit: { icon: "edit", label: strings.message.edit, run: onEdit },
    continue: { icon: "forward", label: strings.message.continue, run: () => attempt(() => continueAnswer(message)) },
    another: {
      icon: "model",
      label: strings.message.anotherModel,
      run: () => set({ dialog: { name: "regenerate", message } }),
    },
    delete: { icon: "bin", label: strings.message.delete, danger: true, run: () => attempt(() => deleteMessage(message)) },
  };
  const several = SEVERAL.map((count) => ({
    icon: "several",
    label: strings.message.writeSeveral(count),
    run: () => attempt(() => regenerate(message, count)),
  }));
  const more = () => [
    entries.edit,
    ...(message.state === "complete" ? [entries.continue] : []),
    ...several,
    ...(state.models.length > 1 ? [entries.another] : []),
    entries.delete,
  ];
  const content = () => (user ? message.content : splitReasoning(message.content).answer);
  const button = ({ icon, label, run }) => html`<${IconButton} icon=${icon} label=${label} onClick=${run} />`;
  return html`<div class="actions">
    ${siblings.length > 1 && html`<${BranchSwitcher} message=${message} siblings=${siblings} />`}
    <${CopyButton} text=${content} label=${strings.message.copy} />
    ${user
      ? html`${button(entries.edit)}${button(entries.delete)}`
      : html`<${IconButton} icon="redo" label=${strings.message.regenerate} onClick=${() => attempt(() => regenerate(message))} />
          ${message.has_tokens &&
          html`<${IconButton} icon="tokens" label=${strings.tokens.show} aria-pressed=${inspecting} onClick=${onInspect} />`}
          <${Menu} label=${strings.message.more} items=${more} />`}
    <${Statistics} message=${message} />
  </div>`;
}

/** What a key does while the message itself has the focus. */
function messageKey(event, message, siblings, edit, inspect) {
  const at = siblings.indexOf(message.id);
  const show = (id) => attempt(() => selectBranch(state.trees.get(message.conversation).messages.get(id)));
  const actions = {
    e: edit,
    c: () => copyText(message.content),
    t: () => message.has_tokens && inspect(),
    r: () => message.role === "assistant" && attempt(() => regenerate(message)),
    Delete: () => attempt(() => deleteMessage(message)),
    ArrowLeft: () => at > 0 && show(siblings[at - 1]),
    ArrowRight: () => at < siblings.length - 1 && show(siblings[at + 1]),
  };
  const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : actions[event.key];
  if (!action || (message.state === "writing" && !event.key.startsWith("Arrow"))) return;
  event.preventDefault();
  action();
}

/**
 * A message of the shown branch. It follows its own text, so that a piece of an answer renders nothing else.
 *
 * @param {object} props
 * @param {string} props.conversation
 * @param {string} props.id
 * @param {string[]} props.siblings ids of the messages that it can be switched with
 * @param {boolean} props.near whether it is in the view or not far from it, so that its text is formatted
 * @param {boolean} props.last whether no message follows it
 */
export const Message = memo(function Message({ conversation, id, siblings, near, last }) {
  const [message, trimmed, modelTitle, bundled, loaded] = useStore((current) => {
    const own = current.trees.get(conversation)?.messages.get(id);
    const model = own?.model && current.models.find((item) => item.id === own.model);
    return [own, current.trimmed.get(conversation)?.has(id) ?? false, model?.title, model?.bundled, current.loaded];
  });
  const [editing, setEditing] = useState(false);
  const [inspected, setInspected] = useState(false);
  const article = useRef(null);
  if (!message) return null;
  const user = message.role === "user";
  const writing = message.state === "writing";
  const { reasoning, finished, answer } = user
    ? { reasoning: null, finished: true, answer: message.content }
    : splitReasoning(message.content);
  const name = user ? strings.message.you : modelTitle || message.model || strings.message.model;
  const close = () => {
    setEditing(false);
    article.current?.focus();
  };
  const inspecting = Boolean(inspected && message.has_tokens && !writing);
  const inspect = () => {
    if (document.activeElement.closest(".tokens")) article.current.focus();
    setInspected(!inspecting);
  };
  const branch = (index, alternative) => attempt(() => branchAtToken(message, index, alternative));
  const press = (event) => {
    const closes = event.key === "t" && event.target.closest(".token-text");
    if (event.target === article.current || closes) messageKey(event, message, siblings, () => setEditing(true), inspect);
    else if (event.key === "ArrowUp" && event.target.closest(".branches")) article.current.focus();
  };
  return html`<article
    ref=${article}
    class=${`message ${message.role} ${trimmed ? "trimmed" : ""} ${last ? "last" : ""}`}
    data-message=${id}
    data-state=${message.state}
    tabindex="-1"
    aria-label=${strings.message.label(name)}
    aria-busy=${writing}
    onKeyDown=${press}
  >
    <header class="message-header">
      <span class=${user ? "visually-hidden" : "message-name"}>${name}</span>
      ${trimmed && html`<span class="trimmed-mark">${strings.message.trimmed}</span>`}
    </header>
    ${message.attachments?.length > 0 && html`<${Attachments} attachments=${message.attachments} />`}
    ${message.rounds?.map(
      (round, index) =>
        html`<${Round} key=${index} message=${message} round=${round} bundled=${bundled} near=${near && loaded} />`,
    )}
    ${reasoning !== null && !inspecting && html`<${Reasoning} text=${reasoning} finished=${finished} writing=${writing} />`}
    ${editing
      ? html`<${Editor} message=${message} onClose=${close} />`
      : user
        ? html`<${UserText} text=${message.content} />`
        : inspecting
          ? html`<${TokenView} message=${message} onBranch=${branch} />`
          : answer && html`<${Answer} text=${answer} writing=${writing} bundled=${bundled} near=${near && loaded} />`}
    ${message.passages?.length > 0 && html`<${Passages} passages=${message.passages} />`}
    ${message.stats?.no_passage && html`<p class="quiet">${strings.message.noPassage}</p>`}
    ${bundled && message.stats?.small_talk && html`<p class="quiet">${strings.message.smallTalk} <a href="#/models">${strings.welcome.getModel}</a></p>`}
    ${message.stats?.tools_ignored && html`<p class="quiet">${strings.message.toolsIgnored}</p>`}
    ${writing && !message.content && !awaitsDecision(message) && html`<${Progress} id=${id} />`}
    <${Outcome} message=${message} />
    ${!editing &&
    (writing
      ? html`<div class="actions">
          ${siblings.length > 1 && html`<${BranchSwitcher} message=${message} siblings=${siblings} />`}
          <${Statistics} message=${message} />
        </div>`
      : html`<${Actions}
          message=${message}
          siblings=${siblings}
          onEdit=${() => setEditing(true)}
          inspecting=${inspecting}
          onInspect=${inspect}
        />`)}
  </article>`;
});
