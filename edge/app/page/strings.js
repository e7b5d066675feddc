/** All English of the page, by view; functions where something is put in. */

const count = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
const turns = (number) => count(number, "turn", "turns");

function size(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  if (bytes < 1e6) return `${(bytes / 1000).toFixed(bytes < 1e4 ? 1 : 0)} kB`;
  if (bytes < 1e9) return `${(bytes / 1e6).toFixed(1)} MB`;
  return `${(bytes / 1e9).toFixed(1)} GB`;
}

/** A probability from 0 to 1; one that is not certain is never shown as 100 %. */
function percent(probability) {
  const value = 100 * probability;
  if (value > 99.95) return value < 100 ? "99.9\u00a0%" : "100\u00a0%";
  if (value < 0.05) return "<\u00a00.1\u00a0%";
  return `${value < 10 || value > 99 ? value.toFixed(1) : Math.round(value)}\u00a0%`;
}

const seconds = (value) => (value < 10 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`);

export const strings = {
  common: {
    cancel: "Cancel",
    close: "Close",
    copied: "Copied",
    copy: "Copy",
    save: "Save",
    size,
    tokens: (number) => count(number, "token", "tokens"),
  },
  announcements: {
    complete: "The answer is finished.",
    stopped: "The answer was stopped.",
    length: "The answer has reached its limit of tokens.",
    failed: "The answer has failed.",
    interrupted: "The answer was interrupted.",
  },
  chat: {
    loading: "Loading …",
    newTitle: "New chat",
    settings: "Settings of this conversation",
    skip: "Skip to writing a message",
    toEnd: "Jump to the latest",
    trimmed: (number) =>
      `The model does not see the messages above any more: ${turns(number)} left out to make room in its context.`,
  },
  composer: {
    attach: "Attach text files",
    attachments: "Attached files",
    drop: "Drop text files to attach them",
    hintCtrlEnter: "Ctrl+Enter sends",
    hintEnter: "Enter sends, Shift+Enter begins a line",
    label: "Write a message",
    notText: (name) => `${name} is not a text file in UTF-8, so it cannot be attached`,
    placeholder: "Write a message",
    removeFile: (name) => `Remove ${name}`,
    send: "Send",
    stop: "Stop the answer (Esc)",
    stopFirst: "The model is still answering. Stop it with Esc, or wait until it has finished.",
    textLabel: "Message",
    tooLarge: (name, bytes, most) => `${name} has ${size(bytes)}, more than the ${size(most)} that can be taken`,
  },
  connection: {
    lost: {
      what: "The edge-run app has ended; start it again.",
      more: "Everything so far is kept; this page goes on by itself when the app is back.",
    },
    refused: {
      what: "The edge-run app does not know this browser any more.",
      more: "Run edge-run app, and open the address that it prints.",
    },
  },
  conversation: {
    apply: "Apply",
    choosePreset: "Choose a preset",
    deletePreset: "Delete",
    export: "Export this conversation as",
    fields: {
      temperature: { label: "Temperature", standard: "the model's", about: "0 always takes the likeliest token." },
      top_p: { label: "Top-p", standard: "the model's", about: "Keeps the likeliest tokens up to this probability." },
      top_k: { label: "Top-k", standard: "the model's", about: "Keeps this many tokens; 0 keeps all." },
      min_p: { label: "Min-p", standard: "the model's", about: "Drops tokens below this share of the best one." },
      repeat_penalty: { label: "Repeat penalty", standard: "the model's", about: "Above 1, repeating gets less likely." },
      presence_penalty: { label: "Presence penalty", standard: "0", about: "Lowers tokens that have occurred." },
      frequency_penalty: { label: "Frequency penalty", standard: "0", about: "Lowers tokens by how often they occurred." },
      max_tokens: { label: "Longest answer", standard: "up to the context", about: "In tokens." },
      seed: { label: "Seed", standard: "random", about: "The same seed gives the same answer." },
    },
    folder: "Folder",
    json: "JSON",
    markdown: "Markdown",
    modelDefault: (value) => `${value} (the model's)`,
    name: "Title",
    nameByItself: "Named after the first message",
    noFolder: "None",
    noPresets: "No presets yet",
    notNumber: "This must be a number.",
    notWhole: "This must be a whole number.",
    outOfRange: (min, max, above) => `This must be ${above ? "above" : "from"} ${min} ${above ? "and at most" : "to"} ${max}.`,
    preset: "Preset",
    presetDeleted: (name) => `Deleted the preset “${name}”`,
    presetName: "Name of the preset",
    presets: "Presets: a system prompt with sampling",
    sampling: "Sampling",
    samplingHint: "An empty field takes the model's own default.",
    saveAsPreset: "Save as preset …",
    stop: "Stop sequences",
    stopHint: "One a line; \\n stands for a line break. The answer ends before them.",
    system: "System prompt",
    systemHint: "What the model is told before the first message",
    title: "Settings of this conversation",
  },
  errors: {
    unreachable: "The edge-run app does not answer; start it again.",
    unreadable: "The edge-run app has sent an answer that cannot be read.",
  },
  markdown: {
    code: (language) => (language ? `Code: ${language}` : "Code"),
    copied: "Copied",
    copy: "Copy",
    direction: "contains characters that change the direction of text",
    imageNotLoaded: "image not loaded",
    table: "Table",
    task: (done) => (done ? "done" : "to do"),
    tooLarge: "Shown as plain text, because it is too large or too deeply nested to be formatted.",
  },
  message: {
    attachments: "Attached files",
    branches: "Branches",
    branchOf: (at, all) => `Branch ${at} of ${all}`,
    continue: "Continue",
    copy: "Copy message",
    delete: "Delete, with what follows",
    edit: "Edit",
    editAnswerHint: "Esc cancels",
    editHint: "Ctrl+Enter saves and answers, Esc cancels",
    editLabel: "Text of the message",
    failed: "The answer has failed.",
    interrupted: "Interrupted: the app ended while this was written.",
    justSave: "Just save",
    label: (name) => `Message of ${name}`,
    length: "The limit of tokens is reached.",
    model: "Model",
    nextBranch: "Next branch",
    previousBranch: "Previous branch",
    regenerate: "Regenerate",
    retry: "Retry",
    saveAndAnswer: "Save as branch and answer",
    saveAsBranch: "Save as branch",
    showAll: (characters) => `Show all ${characters.toLocaleString("en")} characters`,
    stage: (stage) =>
      ({
        "loading the model": "Loading the model",
        "measuring the speed of this model": "Measuring once how fast this model is here",
        "reading the prompt": "Reading the conversation",
      })[stage] ?? stage,
    statistics: (numbers) =>
      [
        count(numbers.tokens, "token", "tokens"),
        numbers.tokens_per_second != null && `${numbers.tokens_per_second.toFixed(1)} tokens/s`,
        numbers.first_token_s != null && `first token after ${seconds(numbers.first_token_s)}`,
      ]
        .filter(Boolean)
        .join(" · "),
    stopped: "Stopped.",
    thinking: (elapsed) => (elapsed ? `Thinking for ${elapsed} s …` : "Thinking …"),
    thought: (words, elapsed) =>
      elapsed ? `Thought for ${elapsed} s (${count(words, "word", "words")})` : `Reasoning (${count(words, "word", "words")})`,
    trimmed: "not seen by the model",
    waiting: "Waiting for the model",
    you: "You",
  },
  meter: {
    explanation: ({ tokens, context, reserve }) =>
      `${tokens.toLocaleString("en")} of ${context.toLocaleString("en")} tokens of the model's context are used, with what is typed.` +
      ` ${(reserve ?? 0).toLocaleString("en")} are kept free for the answer.`,
    label: "Tokens of the context in use",
    nearlyFull: "Nearly full: soon the oldest turns are left out",
    numbers: (tokens, context) => `${tokens.toLocaleString("en")} / ${context.toLocaleString("en")}`,
    trims: (number) => `The oldest ${number === 1 ? "turn" : turns(number)} will be left out`,
  },
  notices: {
    conversationDeleted: (title) => `Deleted “${title}”`,
    dismiss: "Dismiss",
    label: "Notices",
    messageDeleted: "Deleted the message with what follows",
    undo: "Undo",
  },
  search: {
    found: (number) => (number ? `Found ${count(number, "place", "places")}` : "Nothing found"),
    hint: "Searches the titles and all messages, of every branch.",
    label: "Words to search for",
    placeholder: "Search conversations",
    results: "Results",
    title: "Search",
  },
  settings: {
    about: "About",
    answers: "Answers",
    enter_sends: {
      label: "Sending a message",
      choices: { true: "Enter sends, Shift+Enter begins a line", false: "Ctrl+Enter sends, Enter begins a line" },
    },
    exportAll: "Export all conversations",
    files: "Conversations as files",
    filesAbout: "JSON keeps everything, with all branches. Markdown is for reading; it can be imported too.",
    font_size: { label: "Font size", value: (pixels) => `${pixels} px` },
    import: "Import …",
    imported: (number) => `Imported ${count(number, "conversation", "conversations")}`,
    look: "Look",
    machine: ({ system, cores, memory_bytes: memory }) =>
      [system, cores && count(cores, "core", "cores"), memory && `${Math.round(memory / 2 ** 30)} GB of memory`]
        .filter(Boolean)
        .join(" · "),
    open: "Open",
    show_statistics: {
      label: "Show statistics under answers",
      about: "Tokens, tokens per second and the time to the first token.",
    },
    showIntroduction: "Show the introduction again",
    theme: { label: "Theme", choices: { system: "As the system", light: "Light", dark: "Dark" } },
    title: "Settings",
    token_details: {
      label: "Keep the details of every token",
      about:
        "Answers can then show each token's probability, its alternatives and how it was drafted. It costs about half a millisecond a token with a vocabulary of 150,000, and some space on disk.",
    },
    version: (version) => `edge-run ${version}. Conversations, models and settings stay on this machine.`,
    writing: "Writing",
  },
  shortcuts: {
    groups: [
      [
        "Everywhere",
        [
          ["Ctrl+K", "Search conversations"],
          ["Ctrl+Shift+O", "New chat"],
          ["Ctrl+Shift+S", "Settings of this conversation"],
          ["Ctrl+,", "Settings of the app"],
          ["Ctrl+Z", "Undo what the latest notice says"],
          ["/", "Write a message"],
          ["?", "This list"],
          ["Esc", "Stop the answer; close what is open"],
        ],
      ],
      [
        "Messages",
        [
          ["Alt+↑ Alt+↓", "Go to the message before or after"],
          ["← →", "On a message: show the branch before or after"],
          ["E", "On a message: edit"],
          ["R", "On an answer: regenerate"],
          ["C", "On a message: copy"],
          ["T", "On an answer: look inside, token by token"],
          ["Delete", "On a message: delete, with what follows"],
          ["↑", "In an empty composer: go to your last message"],
        ],
      ],
      [
        "List of conversations",
        [
          ["↑ ↓", "Go through the list"],
          ["Enter", "Open"],
          ["F2", "Rename"],
          ["Delete", "Delete"],
        ],
      ],
    ],
    title: "Keyboard",
  },
  sidebar: {
    actions: (title) => `Actions for ${title}`,
    conversations: "Conversations",
    delete: "Delete",
    deleted: "Deleted",
    empty: "Conversations appear here.",
    exportJson: "Export as JSON",
    exportMarkdown: "Export as Markdown",
    hide: "Hide the sidebar",
    label: "Sidebar",
    models: "Models",
    month: "Previous 30 days",
    move: "Move to folder …",
    moveLabel: "Folder (empty for none)",
    moveSave: "Move",
    moveTitle: "Move to folder",
    newChat: "New chat",
    nothingDeleted: "Nothing has been deleted.",
    older: "Older",
    pages: "Pages",
    pin: "Pin",
    pinned: "Pinned",
    rename: "Rename …",
    renameTitle: "Rename",
    restore: "Restore",
    search: "Search (Ctrl+K)",
    settings: "Settings",
    shortcuts: "Keyboard",
    show: "Show the sidebar",
    today: "Today",
    unpin: "Unpin",
    untitled: "Untitled",
    week: "Previous 7 days",
    writing: "is being answered",
    yesterday: "Yesterday",
  },
  tokens: {
    acceptedFrom: (drafter) => `accepted from ${drafter}`,
    alternative: (text, percent, note) => `Branch here with “${text}”, ${percent}${note && `, ${note}`}`,
    alternatives: "Choose another token to branch here:",
    branch: (text) => `Branch here with “${text}”`,
    chosen: "chosen by you",
    colourBy: "Colour by",
    corrected: "corrected by the model",
    current: (text, percent) => `“${text}”, ${percent}, written`,
    details: (text) => `Token “${text}”`,
    drafters: {
      suffix: "suffix look-up",
      history: "look-up in earlier conversations",
      ngram: "the n-gram table",
      recycle: "recycled candidates",
      model: "the draft model",
      other: "another drafter",
    },
    ids: (ids) => `${ids.length > 1 ? "ids" : "id"} ${ids.join(", ")}`,
    keys: "Arrow keys go from token to token, Enter goes to the alternatives, Esc closes.",
    label: (text, percent, origin) => `“${text}”, ${percent}. ${origin}`,
    legend: "Meaning of the colours",
    levels: ["90 % and more", "from 70 %", "from 50 %", "from 30 %", "from 10 %", "below 10 %"],
    list: "Tokens of the answer",
    modes: { probability: "probability", origin: "origin" },
    none: "No details of the tokens were kept for this answer. The settings say whether they are kept.",
    origin: {
      prefill: () => "The first token, from the pass that read the prompt.",
      decoded: () => "Decoded by the model in a pass of its own, without a draft.",
      accepted: (drafter) => `Drafted by ${drafter} and accepted.`,
      corrected: (drafter, rejected) => `The draft said “${rejected}” (from ${drafter}); the model corrected it.`,
      bonus: () => "The model's own token behind an accepted draft, from the same pass.",
      chosen: (_, rejected) => `Chosen by you in place of “${rejected}”.`,
    },
    own: "the model's own",
    parts: (number) => `${number} tokens make up these characters; their probabilities are multiplied.`,
    percent,
    show: "Look inside: tokens and probabilities",
    special: "control token",
    specialToken: (text) => `control token ${text}`,
    summary: ({ tokens, accepted, passes, mean }) =>
      [
        count(tokens, "token", "tokens"),
        accepted
          ? `${accepted.toLocaleString("en")} accepted from drafts (${percent(accepted / tokens)}): ${count(passes, "pass", "passes")} instead of ${(passes + accepted).toLocaleString("en")}`
          : `none from drafts: ${count(passes, "pass", "passes")}`,
        `mean probability ${percent(mean)}`,
      ].join(" · "),
    title: "Tokens of this answer",
    unknown: "No details were kept for this part.",
    written: "written",
  },
  welcome: {
    bundled:
      "The model that comes along is a small shell helper: it turns a request in English into a shell command. It is not a chat model, and answers nothing else well. To chat, get a chat model first; it takes one click and a download.",
    bundledShort: "The bundled model writes shell commands; it is not a chat model.",
    chatExamples: [
      "Explain what a hash table is, with a small example",
      "Write a polite reminder for an unpaid invoice",
      "What should I ask before renting a flat?",
    ],
    examples: "Examples",
    getModel: "Get a chat model",
    greeting: "What can I help you with?",
    greetingShell: "Describe what the shell should do",
    introduction: "About edge-run",
    local:
      "Everything stays on this machine: what you write, what the model answers, and your files. Nothing is sent anywhere, and it works without a network.",
    shellExamples: [
      "find files larger than 100 MB",
      "show the ten largest folders here",
      "count the lines in all Python files",
      "which process uses port 8080",
    ],
    understood: "Understood",
    what: "edge-run runs language models on your own computer.",
  },
};
