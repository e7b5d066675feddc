/** The messages of one conversation: a tree, of which a path from the root to the leaf is shown. */

export class MessageTree {
  /**
   * @param {object[]} messages as the server gives them
   * @param {{message: string, sequence: number, rate?: object}[]} writing answers in progress, with the pieces in them
   * @param {MessageTree} [before] what was known: messages that are as they were stay the same objects
   */
  constructor(messages, writing, before) {
    const kept = (message) => {
      const known = before?.messages.get(message.id);
      return known && JSON.stringify(known) === JSON.stringify(message) ? known : message;
    };
    /** @type {Map<string, object>} replaced entry by entry, so that a view sees its message change and no other */
    this.messages = new Map(messages.map((message) => [message.id, kept(message)]));
    this.sequences = new Map(writing.map(({ message, sequence }) => [message, sequence]));
    for (const { message, rate } of writing) {
      if (rate && this.messages.has(message)) this.messages.set(message, { ...this.messages.get(message), rate });
    }
    this.structure = 0;
    this.paths = new Map();
    this.children = before?.children ?? null;
    this.index();
  }

  /** Sorts messages under their parents after some came or went. What has not changed stays the same array. */
  index() {
    const before = this.children;
    this.children = new Map();
    for (const message of this.messages.values()) {
      const parent = message.parent ?? null;
      if (this.children.has(parent)) this.children.get(parent).push(message.id);
      else this.children.set(parent, [message.id]);
    }
    for (const [parent, ids] of this.children) {
      ids.sort((a, b) => this.messages.get(a).created - this.messages.get(b).created);
      const old = before?.get(parent);
      if (old?.length === ids.length && ids.every((id, at) => id === old[at])) this.children.set(parent, old);
    }
    this.structure += 1;
    this.paths.clear();
  }

  /** Ids from the root to `leaf`; the same array until messages come or go. */
  path(leaf) {
    let path = this.paths.get(leaf);
    if (!path) {
      path = [];
      for (let id = leaf; id != null && this.messages.has(id) && path.length < this.messages.size; ) {
        path.push(id);
        id = this.messages.get(id).parent;
      }
      path.reverse();
      this.paths.set(leaf, path);
    }
    return path;
  }

  /** Ids of the messages that answer the same message as `id`, the oldest first. */
  siblings(id) {
    return this.children.get(this.messages.get(id)?.parent ?? null) ?? [];
  }

  /** Takes a message as the server has it. */
  put(message) {
    const known = this.messages.get(message.id);
    if (message.state !== "writing") this.sequences.delete(message.id);
    else if (known?.state !== "writing") this.sequences.set(message.id, 0);
    this.messages.set(message.id, message);
    if (!known || known.parent !== message.parent) this.index();
  }

  /** Marks an answer as being written again, before its first new piece. */
  resume(id) {
    const message = this.messages.get(id);
    if (message && message.state !== "writing") this.put({ ...message, state: "writing", rate: null });
  }

  /** Removes a message with everything that follows it. */
  remove(id) {
    const waiting = [id];
    while (waiting.length) {
      const next = waiting.pop();
      waiting.push(...(this.children.get(next) ?? []));
      this.messages.delete(next);
      this.sequences.delete(next);
    }
    this.index();
  }

  /**
   * Adds a piece of an answer in progress.
   *
   * @returns {boolean} false where pieces are missing, so that the conversation has to be fetched again
   */
  append(id, sequence, text, rate) {
    this.resume(id);
    const message = this.messages.get(id);
    const last = this.sequences.get(id) ?? 0;
    if (!message || sequence > last + 1) return false;
    if (sequence <= last) return true;
    this.sequences.set(id, sequence);
    this.messages.set(id, { ...message, content: message.content + text, rate });
    return true;
  }
}
