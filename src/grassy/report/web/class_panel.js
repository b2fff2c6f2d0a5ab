// One class: how good, what it is mistaken for, and its images.

function showClass(i) {
  const { a, b } = current, place = byId("class-panel");
  const facts = [["Accuracy", a.accuracy(i) === null ? null : `${fixed(a.accuracy(i), 1)}\u2009%`, a.images(i) ? `${a.images(i) - a.mistakenCount(i)} of ${a.images(i)}` : null],
    b?.measured ? ["in B", `${fixed(b.accuracy(i), 1)}\u2009%`] : null,
    a.per.training_images ? ["Training images", String(a.per.training_images[i])] : null,
    a.per.effective_rank?.[i] != null ? ["Effective rank", fixed(a.per.effective_rank[i], 2), `of ${a.per.dimension[i]}`] : null,
    ["Number", String(i)]].filter((fact) => fact && fact[1] !== null);
  place.replaceChildren(
    element("h3", {}, element("span", { className: "and" }, "class "), ...breakable(a.names[i])),
    element("dl", { className: "facts" }, ...facts.map(([term, value, of]) => element("div", {}, element("dt", {}, term),
      element("dd", {}, value, of ? element("span", { className: "soft" }, ` ${of}`) : null)))),
    ...(a.measured ? classImages(i, a) : [element("p", { className: "hint" }, "Accuracy and pictures need images: run grassy report with --data-dir.")]),
    element("p", { className: "onwards" }, link("Nearest classes, angles and energy", () => openGeometry(i, i))));
}

function classImages(i, run) {
  if (!run.images(i)) return [element("p", { className: "hint" }, "No measured image has this class.")];
  const wrong = run.mistakesOf(i), count = run.mistakenCount(i);
  const where = run.subspaces ? "the subspace" : "the direction of the vector";
  return [
    mistakenBars(i, run),
    count ? galleryPart(plural(count, "mistake", "mistakes"), `The predicted class, most confident first.${wrong.length < count ? ` This page holds ${wrong.length} of them.` : ""}`,
      run, wrong, mistakenFor) : element("p", { className: "small" }, "Every image of this class is classified correctly."),
    galleryPart("Other classes taken for it", "The true class, most confident first.", run, run.takenFor(i), isReally, 6),
    ...(run.examples ? [
      galleryPart("Most typical", `The features with the largest share in ${where} of the class.`, run, run.examples.typical[i], insideShare, 8),
      galleryPart("Least typical", `The features with the smallest share in ${where}: unusual views or wrong labels.`, run, run.examples.untypical[i], insideShare, 8),
    ] : [element("p", { className: "hint" }, "No pictures: the images could not be matched with the measured features.")]),
  ].filter(Boolean);
}

/** What a class is mistaken for, as bars that lead to the images. */
function mistakenBars(i, run) {
  const rows = run.per.confusions[i].slice(0, 6);
  if (!rows.length) return null;
  return element("div", { className: "part" }, element("h4", {}, "Mistaken for"),
    element("ol", { className: "bars wide" }, ...rows.map(([j, count]) => element("li", {},
      link(run.names[j], () => openConfusion(i, j)), track(count / run.images(i)),
      element("span", { className: "value" }, `${count}`), element("span", { className: "value soft" }, percent(count / run.images(i)))))));
}

const track = (share) => element("span", { className: "track", "aria-hidden": "true" },
  element("span", { className: "fill", style: `width: ${Math.min(100, 100 * share).toFixed(2)}%` }));
