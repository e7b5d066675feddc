/** The page's icons: strokes on a grid of 24, drawn in the colour of the text around them. */

import { html } from "edgerun/preact";

const PATHS = {
  attach: "M20 11.5l-8.2 8.2a5 5 0 0 1-7.1-7.1l8.5-8.5a3.4 3.4 0 0 1 4.8 4.8l-8.5 8.5a1.7 1.7 0 0 1-2.4-2.4l7.8-7.8",
  bin: "M4 7h16M10 11v6M14 11v6M6 7l1 13h10l1-13M9 7V4h6v3",
  camera: "M4 8h3l2-3h6l2 3h3v11H4zM12 16.5a3.5 3.5 0 1 0 0-7 3.5 3.5 0 0 0 0 7z",
  check: "M5 12.5l4.5 4.5L19 7",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  down: "M12 5v14M6 13l6 6 6-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  folder: "M3 6h6l2 2h10v11H3z",
  forward: "M13 5l7 7-7 7M4 12h16",
  gear:
    "M12 15.2a3.2 3.2 0 1 0 0-6.4 3.2 3.2 0 0 0 0 6.4zM19.4 13.5l1.8 1.4-2 3.4-2.1-.9a7.6 7.6 0 0 1-2.5 1.5l-.3 2.2h-4l-.3-2.2a7.6 7.6 0 0 1-2.5-1.5l-2.1.9-2-3.4 1.8-1.4a7.7 7.7 0 0 1 0-3l-1.8-1.4 2-3.4 2.1.9a7.6 7.6 0 0 1 2.5-1.5l.3-2.2h4l.3 2.2a7.6 7.6 0 0 1 2.5 1.5l2.1-.9 2 3.4-1.8 1.4a7.7 7.7 0 0 1 0 3z",
  keyboard: "M2 6h20v12H2zM6 10h.01M10 10h.01M14 10h.01M18 10h.01M7 14h10",
  left: "M15 5l-7 7 7 7",
  menu: "M4 6h16M4 12h16M4 18h16",
  model: "M12 3l8 4.5v9L12 21l-8-4.5v-9zM12 12l8-4.5M12 12v9M12 12L4 7.5",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  pin: "M12 16v5M8 3h8l-1 7 3 3v3H6v-3l3-3z",
  plus: "M12 5v14M5 12h14",
  redo: "M20 5v5h-5M20 10a8 8 0 1 0 1 5",
  right: "M9 5l7 7-7 7",
  search: "M11 18a7 7 0 1 0 0-14 7 7 0 0 0 0 14zM16 16l5 5",
  send: "M12 19V5M6 11l6-6 6 6",
  several: "M4 6h16M4 12h9M4 18h9M18 14v6M15 17h6",
  sliders: "M4 7h10M18 7h2M4 17h2M10 17h10M14 5v4M8 15v4",
  stop: "M7 7h10v10H7z",
  tokens: "M4 5h6v5H4zM14 5h6v5h-6zM4 14h3v5H4zM11 14h9v5h-9z",
  tool: "M14 6a4.5 4.5 0 0 0 5.6 5.6l-8.9 8.9a2.1 2.1 0 0 1-3-3l8.9-8.9M14 6l3-3a4.5 4.5 0 0 1 3.6 5.6M14 6l2.6 2.6",
  warning: "M12 4l9 16H3zM12 10v4M12 17h.01",
};

/** An icon beside or instead of text; screen readers skip it, so a button of an icon alone needs a label. */
export function Icon({ name }) {
  return html`<svg class=${`icon icon-${name}`} viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}
