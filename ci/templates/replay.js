(() => {
  "use strict";
  const root = document.documentElement;
  const steps = [...document.querySelectorAll("section.step")];
  if (!steps.length) return;
  root.classList.add("script");
  const slider = document.getElementById("slider");
  const heading = document.getElementById("now");
  const rows = [...document.querySelectorAll("#steps tr[data-step]")];
  const previous = document.getElementById("previous");
  const next = document.getElementById("next");
  const start = Number(slider.defaultValue);
  let at = start;

  function show(index, remember) {
    at = Math.max(0, Math.min(steps.length - 1, index));
    steps.forEach((step, i) => step.classList.toggle("current", i === at));
    const step = steps[at].dataset.step;
    rows.forEach((row) => row.classList.toggle("current", row.dataset.step === step));
    slider.value = String(at);
    slider.setAttribute("aria-valuetext", steps[at].dataset.title);
    heading.textContent = steps[at].dataset.title;
    previous.disabled = at === 0;
    next.disabled = at === steps.length - 1;
    if (remember) history.replaceState(null, "", "#step-" + step);
  }

  function linked() {
    const index = steps.findIndex((step) => "#" + step.id === location.hash);
    show(index < 0 ? start : index, false);
  }

  slider.addEventListener("input", () => show(Number(slider.value), true));
  previous.addEventListener("click", () => show(at - 1, true));
  next.addEventListener("click", () => show(at + 1, true));
  rows.forEach((row) => {
    const link = row.querySelector("a");
    row.addEventListener("click", (event) => {
      if (window.getSelection().toString()) return;
      event.preventDefault();
      show(steps.findIndex((step) => step.dataset.step === row.dataset.step), true);
      if (link) link.focus({ preventScroll: true });
    });
  });
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target === slider) return;
    if (event.target.closest(".scroll")) return;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to, true);
  });
  window.addEventListener("hashchange", linked);

  document.getElementById("all").addEventListener("change", (event) => {
    root.classList.toggle("all", event.target.checked);
  });
  const copy = document.getElementById("copy");
  if (copy) {
    copy.addEventListener("click", () => {
      const text = document.getElementById("command").textContent;
      const done = () => { copy.textContent = "copied"; };
      if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, () => {});
    });
  }
  document.getElementById("save").addEventListener("click", (event) => {
    const text = JSON.stringify(JSON.parse(document.getElementById("trace").textContent), null, 2) + "\n";
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = event.currentTarget.dataset.name;
    link.click();
    URL.revokeObjectURL(link.href);
  });
  linked();
})();
