/** Takes a picture with the camera of this machine. */

import { html, useEffect, useRef, useState } from "edgerun/preact";

import { strings } from "../strings.js";
import { Dialog } from "./dialogs.js";

/** A dialog with what the camera sees; `onTaken` gets a picture as a file. */
export function CameraDialog({ onTaken, onClose }) {
  const video = useRef(null);
  const [ready, setReady] = useState(false);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const opening = navigator.mediaDevices.getUserMedia({ video: true });
    opening.then(
      (stream) => {
        if (video.current) video.current.srcObject = stream;
      },
      (error) => setProblem(error.message),
    );
    return () =>
      opening.then(
        (stream) => stream.getTracks().forEach((track) => track.stop()),
        () => undefined,
      );
  }, []);
  const take = async () => {
    const canvas = new OffscreenCanvas(video.current.videoWidth, video.current.videoHeight);
    canvas.getContext("2d").drawImage(video.current, 0, 0);
    onTaken(new File([await canvas.convertToBlob()], "camera.png", { type: "image/png" }));
    onClose();
  };
  return html`<${Dialog} title=${strings.composer.camera} onClose=${onClose} className="camera">
    ${problem ? html`<p role="alert">${problem}</p>` : html`<video ref=${video} autoplay muted playsinline onLoadedData=${() => setReady(true)}></video>`}
    <div class="dialog-actions">
      <button type="button" class="button primary" disabled=${!ready} onClick=${take}>${strings.composer.take}</button>
    </div>
  <//>`;
}
