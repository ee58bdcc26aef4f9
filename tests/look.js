/** Looks at the page that it is put into as a reader would, and posts to `/look` what is wrong. */
addEventListener("load", async () => {
  await new Promise((resolve) => setTimeout(resolve, 300)); // scripts of the page have drawn what they draw

  const numbers = (text) => (text.match(/[\d.]+/g) ?? []).map(Number);
  const over = (above, below) => {
    const [r, g, b, alpha = 1] = above;
    return [r, g, b].map((part, i) => part * alpha + below[i] * (1 - alpha));
  };
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    const own = numbers(getComputedStyle(element).backgroundColor);
    return own.length && own[3] !== 0 ? over(own, own[3] === undefined ? own : behind(element.parentElement)) : behind(element.parentElement);
  };
  const light = (colour) =>
    colour
      .map((part) => part / 255)
      .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
      .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (element) => {
    const style = getComputedStyle(element);
    const paper = behind(element);
    const [a, b] = [over(numbers(element.closest("svg") ? style.fill : style.color), paper), paper].map(light);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const isSeen = (element) =>
    element.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && element.getClientRects().length > 0;
  const isLarge = (element) => {
    const { fontSize, fontWeight } = getComputedStyle(element);
    return parseFloat(fontSize) >= (Number(fontWeight) >= 700 ? 18.6 : 24);
  };
  const told = (element) => `${element.tagName.toLowerCase()}.${element.className?.baseVal ?? element.className}: ${element.textContent.trim().slice(0, 40)}`;
  const name = (element) =>
    element.getAttribute("aria-label") ||
    element.getAttribute("title") ||
    element.textContent.trim() ||
    element.querySelector("[alt]")?.alt ||
    element.labels?.[0]?.textContent.trim() ||
    element.placeholder;

  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const texts = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const isText = walker.currentNode.data.trim() && !element.closest("script, style, noscript, template, :disabled");
    if (isText && isSeen(element)) texts.add(element);
  }
  const faint = [...texts].filter((element) => contrast(element) < (isLarge(element) ? 3 : 4.5));
  const controls = [...document.querySelectorAll("a[href], button, input, select, textarea, [tabindex]")].filter(isSeen);
  const pictures = [...document.querySelectorAll("img, svg[role=img]")].filter(isSeen);
  const boxes = pictures.map((element) => element.getBoundingClientRect());
  const look = {
    title: document.title,
    paper: light(behind(document.body)),
    texts: texts.size,
    faint: faint.map((element) => `${contrast(element).toFixed(2)} ${told(element)}`),
    nameless: controls.filter((element) => !name(element)).map((element) => element.outerHTML.slice(0, 120)),
    wordless: pictures.filter((e) => !(e.alt || e.getAttribute("aria-label"))).map((e) => e.outerHTML.slice(0, 120)),
    pictures: pictures.length,
    smallest: Math.min(...boxes.map((box) => Math.min(box.width, box.height))),
    wide: document.documentElement.scrollWidth - innerWidth,
  };
  await fetch("/look", { method: "POST", body: JSON.stringify(look) });
});
