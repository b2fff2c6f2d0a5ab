// Galleries: small pictures with what the model said of them, and a dialog with all that is known of one.

const FIRST_SHOWN = 12;
const percent = (share, decimals = 0) => share === null || share === undefined ? "–" : `${(100 * share).toFixed(decimals)}\u2009%`;

/** A picture and what is said of it: lines(run, at) gives pairs of a text and a class of style. */
function tile(run, at, lines) {
  const { label, predicted, name } = run.examples;
  const wrong = label[at] !== predicted[at];
  const said = `Image of ${run.names[label[at]]}${wrong ? `, taken for ${run.names[predicted[at]]}` : ""}`;
  const uri = run.picture(at);
  const shown = uri
    ? element("img", { src: uri, alt: "", loading: "lazy", decoding: "async", onload: markPixels })
    : element("span", { className: "no-picture" }, (name?.[at] ?? `image ${run.examples.index[at]}`).split("/").at(-1));
  return element("li", {}, element("button", { type: "button", className: "tile", "aria-label": `${said}. Show more`,
    onclick: () => openPicture(run, at) }, element("span", { className: "frame" }, shown),
  ...lines(run, at).map(([text, kind]) => element("span", { className: `line ${kind}`, title: text }, ...breakable(text)))));
}

const markPixels = (event) => event.target.classList.toggle("pixelated", event.target.naturalWidth <= 32);

const sure = (run, at) => [`confidence ${percent(run.examples.confidence[at])}`, "soft"];
const inside = (run, at) => [`${percent(run.examples.inside[at])} inside`, "soft"];
const predictedName = (run, at) => [run.names[run.examples.predicted[at]], "wrong"];
const labelName = (run, at) => [run.names[run.examples.label[at]], ""];

const mistakenFor = (run, at) => [predictedName(run, at), sure(run, at)];
const isReally = (run, at) => [labelName(run, at), sure(run, at)];
const sureAndInside = (run, at) => [sure(run, at), inside(run, at)];
const insideShare = (run, at) => [
  run.examples.predicted[at] === run.examples.label[at] ? ["correct", "soft"] : predictedName(run, at), inside(run, at)];
const bothNames = (run, at) => [labelName(run, at), [`→ ${run.names[run.examples.predicted[at]]}`, "wrong"], sure(run, at)];
const outlierScore = (run, at) => [labelName(run, at), [`score ${run.examples.outlier[at].toFixed(3)}`, "soft"]];

/** A list of tiles of which the first few are shown, and a button for the rest. */
function gallery(run, positions, lines, most = FIRST_SHOWN) {
  const list = element("ul", { className: "gallery" }, ...positions.slice(0, most).map((at) => tile(run, at, lines)));
  if (positions.length <= most) return list;
  const more = element("button", { type: "button", className: "more" }, `Show all ${positions.length}`);
  more.onclick = () => {
    list.append(...positions.slice(most).map((at) => tile(run, at, lines)));
    more.remove();
    list.children[most].querySelector("button").focus({ preventScroll: true });
  };
  return element("div", {}, list, more);
}

/** A heading with a sentence on what is shown, and a gallery; null if there is nothing to show. */
function galleryPart(title, about, run, positions, lines, most) {
  if (!positions.length) return null;
  return element("div", { className: "part" }, element("h4", {}, title),
    about ? element("p", { className: "small" }, about) : null, gallery(run, positions, lines, most));
}

function openPicture(run, at) {
  const dialog = byId("picture"), { label, predicted, confidence, inside, outlier, name, index } = run.examples;
  const uri = run.picture(at);
  const link = (i) => element("button", { type: "button", className: "link",
    onclick: () => { dialog.close(); openClass(i); } }, ...breakable(run.names[i]));
  const rows = [
    ["File", element("span", { className: "file" }, name?.[at] ?? `image ${index[at]}`)],
    ["Label", link(label[at])],
    ["Prediction", link(predicted[at])],
    ["Confidence", percent(confidence[at], 1)],
    [run.subspaces ? "In the subspace of its label" : "Along the vector of its label", percent(inside[at], 1)],
    ["Outlier score", outlier[at].toFixed(3)],
    allRuns.length > 1 ? ["Run", run.name] : null,
  ].filter(Boolean);
  byId("picture-body").replaceChildren(
    uri ? element("img", { src: uri, alt: `Image of ${run.names[label[at]]}`, onload: markPixels })
      : element("p", { className: "hint" }, "This page has no picture of this image: it holds only some images per class."),
    element("dl", { className: "rows" }, ...rows.map(([term, value]) =>
      element("div", {}, element("dt", {}, term), element("dd", {}, value)))));
  dialog.showModal();
}
