// Reports in a page follow the page's colours: they know how notebooks say which those are.
const mirror = () => {
  document.body.dataset.jpThemeLight = String(document.body.dataset.mdColorScheme !== "slate");
};
new MutationObserver(mirror).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
mirror();
